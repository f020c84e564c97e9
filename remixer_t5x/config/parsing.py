"""Parses gin text, and converts gin errors to one-line UserErrors with the location, the problem, and advice."""

import importlib.util
import inspect
import pathlib
import re
import sys
import tokenize
import traceback
from collections.abc import Iterable, Mapping, Sequence

import gin

from remixer_t5x import lazy
from remixer_t5x.config import files, user_modules
from remixer_t5x.config.files import T5X, GinText
from remixer_t5x.errors import UserError, nearest, one_line

DYNAMIC = 'from __gin__ import dynamic_registration'


def parse(text: GinText, before: Sequence[GinText]) -> None:
    """Parses a gin text. Raises a one-line UserError if gin reports an error.

    A text without dynamic registration may use the imports of earlier files. A flag may use any module.
    """
    header: list[str] = []
    try:
        try:
            gin.parse_config(text.text)
        except ValueError as error:
            header = [] if DYNAMIC in text.text else _missing_imports(text, before)
            if not header or not _raised_in_gin(error):
                raise
            gin.parse_config([DYNAMIC, *header, text.text])
    except Exception as error:
        missing = _missing_module(error)
        is_in_module = user_modules.frames_of(error) and missing not in lazy.FOR_TASKS
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
            user_modules.allowed.add(name)
            known |= {name: f'import {module}'} if importlib.util.find_spec(name) else {}
        lines += [known[name]] if name in known else []
    return list(dict.fromkeys(lines))


def _raised_in_gin(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get('__name__', '').partition('.')[0] in ('gin', 'tokenize')


def _missing_module(error: Exception) -> str:
    """Returns the name of the module that a ModuleNotFoundError names; '' for other errors."""
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
        problem += f'; run {lazy.INSTALL}' if missing in lazy.FOR_TASKS else _suggest_module(missing, ())
    else:
        problem += _suggest_name(''.join(lines[number - 1 : number]), text, before)
    return UserError(f'{text.name if text.is_flag else f"{text.name} line {number}"}: {one_line(problem)}')


def _suggest_name(line: str, text: GinText, before: Sequence[GinText]) -> str:
    """Suggests a setting, class or function for the first unknown name in a statement."""
    imports = {name: line for other in [*reversed(before), text] for name, line in other.imports.items()}
    names = [name.split('.') for name in re.findall(r'[A-Za-z_][\w.]*\.\w+', line)]
    for name in ('.'.join(parts[:end]) for parts in names for end in range(2, len(parts) + 1)):
        parent, _, last = name.rpartition('.')
        if setting := T5X['settings'].get('.'.join(name.split('.')[-2:])):
            return f'; it is a setting of T5X; use its counterpart {setting}'
        if f'sublayers/{parent}.gin' in files.shipped() and parent not in imports:
            return f'; add --gin_file=sublayers/{parent}.gin'
        if (members := _member_names(parent, imports)) and last not in members:
            return nearest(last, members) or f'; {parent} has {", ".join(members)}'
    unknown = [parts[0] for parts in names if parts[0] not in imports]
    return _suggest_module(unknown[0], imports) if unknown else ''


def _suggest_module(name: str, imports: Iterable[str]) -> str:
    """Suggests one of the imported modules or of the modules in the current folder."""
    near = nearest(name, [*imports, *(path.stem for path in pathlib.Path().glob('*.py'))])
    return near or '; check its spelling, that the package is installed, and PYTHONPATH'


def _member_names(name: str, imports: Mapping[str, str]) -> list[str]:
    """Returns the arguments of a class or function, or the classes and functions of a module."""
    try:
        function = gin.get_configurable(name)
    except ValueError:
        module = '.'.join(imports.get(name, f'import {name}').split()[1::2])
        members = vars(sys.modules[module]).items() if module in sys.modules else ()
        return [name for name, member in members if getattr(member, '__module__', '') == module]
    # Use the signature of __init__, because gin gives classes the signature (*args, **kwargs).
    parameters = inspect.signature(function.__init__ if inspect.isclass(function) else function).parameters
    return [parameter for parameter in parameters if parameter not in ('self', 'parent', 'name')]
