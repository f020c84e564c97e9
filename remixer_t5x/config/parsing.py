"""Parses gin text, and converts gin errors to one-line UserErrors with the location, the problem, and advice."""

import importlib.util
import pathlib
import re
import tokenize
import traceback
from collections.abc import Iterable, Sequence

import gin

from remixer_t5x import lazy
from remixer_t5x.config import files, user_modules
from remixer_t5x.config.files import T5X_NAMES, GinText
from remixer_t5x.errors import UserError, nearest, one_line

DYNAMIC_REGISTRATION = 'from __gin__ import dynamic_registration'


def parse(text: GinText, before: Sequence[GinText]) -> None:
    """Parses a gin text. Raises a one-line UserError if gin reports an error.

    A text without dynamic registration may use the imports of the texts in `before`. A flag may use any module.
    """
    header: list[str] = []
    try:
        try:
            gin.parse_config(text.text)
        except ValueError as error:
            header = [] if DYNAMIC_REGISTRATION in text.text else _missing_imports(text, before)
            if not header or not _raised_in_gin(error):
                raise
            gin.parse_config([DYNAMIC_REGISTRATION, *header, text.text])
    except Exception as error:
        missing = _missing_module(error)
        is_in_module = user_modules.find_user_frames(error) and missing not in lazy.TASK_LIBRARIES
        if is_in_module or not (missing or _raised_in_gin(error)):
            raise  # The error is in an imported module.
        raise _one_line_error(error, text, before, 1 + len(header) if header else 0) from None


def _missing_imports(text: GinText, before: Sequence[GinText]) -> list[str]:
    """Returns import statements for the modules that a gin text uses without importing them."""
    known = {name: line for other in reversed(before) for name, line in other.imports.items()}
    lines = []
    for module in re.findall(r'(?:@|^)(?:\w+/)*([\w.]+)\.\w+(?:\.\w+\s*=)?', text.text, re.M):
        name = module.partition('.')[0]
        if name not in known and text.is_flag:
            user_modules.importable_modules.add(name)
            known |= {name: f'import {module}'} if importlib.util.find_spec(name) else {}
        lines += [known[name]] if name in known else []
    return list(dict.fromkeys(lines))


def _raised_in_gin(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get('__name__', '').partition('.')[0] in ('gin', 'tokenize')


def _missing_module(error: Exception) -> str:
    """Returns the name of the missing module if the error is a ModuleNotFoundError, or '' for other errors."""
    # gin raises a copy of the error, whose attribute `name` is None.
    original = error.__context__ if isinstance(error.__context__, ModuleNotFoundError) else error
    return (original.name or '') if isinstance(original, ModuleNotFoundError) else ''


def _one_line_error(error: Exception, text: GinText, before: Sequence[GinText], header: int) -> UserError:
    """Converts gin's error to a UserError with the message `file line N: problem; advice`."""
    lines, (problem, *rest) = text.text.splitlines(), str(error).strip('"').splitlines()
    problem = problem.rstrip('.')
    match = re.search(r'line (\d+)', ' '.join(rest))
    number = int(match[1]) - header if match else 1
    if isinstance(error, tokenize.TokenError):
        # gin detects an unclosed bracket only at the end of the file. The statement starts at the last unindented line.
        number = max((number for number, line in enumerate(lines, 1) if line[:1].isalpha()), default=1)
        problem = 'a bracket or quote is not closed; close it'
    elif isinstance(error, SyntaxError):
        number, problem = error.lineno or 1, str(error.msg).splitlines()[-1].strip(' .')
        problem += '; write NAME = value or module.name.setting = value, and close quotes and brackets'
    elif missing := _missing_module(error):
        problem += f'; run {lazy.INSTALL_COMMAND}' if missing in lazy.TASK_LIBRARIES else _suggest_module(missing, ())
    else:
        problem += _suggest_name(''.join(lines[number - 1 : number]), text, before)
    return UserError(f'{text.name if text.is_flag else f"{text.name} line {number}"}: {one_line(problem)}')


def _suggest_name(line: str, text: GinText, before: Sequence[GinText]) -> str:
    """Suggests the counterpart of a T5X setting, or a file or module to add for the first name that is not imported."""
    imports = {name for other in [*before, text] for name in other.imports}
    for name in re.findall(r'[A-Za-z_][\w.]*\.\w+', line):
        first, *rest = name.split('.')
        for pair in zip([first, *rest], rest, strict=False):
            if setting := T5X_NAMES['settings'].get('.'.join(pair)):
                return f'; it is a setting of T5X; use its counterpart {setting}'
        if first not in imports:
            is_sublayer = f'sublayers/{first}.gin' in files.shipped()
            return f'; add --gin_file=sublayers/{first}.gin' if is_sublayer else _suggest_module(first, imports)
    return ''


def _suggest_module(name: str, imports: Iterable[str]) -> str:
    """Suggests the imported module, or module in the current folder, whose name is most similar to `name`."""
    near = nearest(name, [*imports, *(path.stem for path in pathlib.Path().glob('*.py'))])
    return near or '; check its spelling, that the package is installed, and PYTHONPATH'
