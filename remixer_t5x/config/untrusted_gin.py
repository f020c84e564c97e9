"""Checks that untrusted gin text only configures models of this package, because gin can call any function.

Literals, macros, and the classes and functions defined in `_ALLOWED_PACKAGES` and `_ALLOWED_MODULES` are allowed.
"""

import importlib
import importlib.util
import re
import tokenize

from gin import config_parser

from remixer_t5x.config import loading
from remixer_t5x.errors import UserError, to_one_line

_ALLOWED_PACKAGES = ('remixer_t5x.models.',)
_ALLOWED_MODULES = ('remixer_tasks.vocabularies',)
_DYNAMIC_REGISTRATION = '__gin__.dynamic_registration'


def find_disallowed_statement(text: str, file: str) -> str:
    """Returns the first import, include, macro, function or class that is not allowed, or '' if all are allowed.

    Imports only allowed modules. Raises a UserError that names `file` if the text is not valid gin.
    """
    references, imports, statement_lines = loading.ReferenceCollector(), {}, set()
    lines = text.split('\n')
    # Parsers disagree on which control characters end a line, so one parser's comment could be another's statement.
    if unprintable := next((line for line in lines if not line.replace('\t', ' ').isprintable()), None):
        raise UserError(
            f'{file} must contain only printable characters, got {to_one_line(unprintable):.80}; restore the original '
            'file'
        )
    try:
        for statement in config_parser.ConfigParser(text, references):
            statement_lines.add(statement.location.line_num)
            if isinstance(statement, config_parser.IncludeStatement):
                return f'include {statement.filename!r}'
            if isinstance(statement, config_parser.ImportStatement):
                if statement.module != _DYNAMIC_REGISTRATION and not _is_allowed_module(statement.module):
                    return statement.format()
                imports[statement.bound_name()] = statement
                continue
            names = [name[1:].rpartition('/')[2] for name in references.names if name[0] == '@']
            if isinstance(statement, config_parser.BlockDeclaration) or statement.arg_name:
                names.append(statement.selector)
            elif statement.selector == loading.MODULE:
                return loading.MODULE
            if foreign := next((name for name in names if not _is_allowed_name(name, imports)), ''):
                return foreign
            references.names.clear()
    except (SyntaxError, ValueError, RecursionError, tokenize.TokenError) as error:
        raise UserError(f'{file} is not valid gin ({to_one_line(str(error))}); restore the original file') from None
    # Find lines inside strings that `gin_files.GinReader`, which reads line by line, would treat as imports or
    # includes.
    hidden = (line for number, line in enumerate(lines, 1) if number not in statement_lines)
    return next((line for line in hidden if re.match(r'(from|import|include)\b', line)), '')


def find_imported_packages(text: str) -> list[str]:
    """Returns the top-level packages that the gin text imports, except for the packages of this project."""
    statements = config_parser.ConfigParser(text, loading.ReferenceCollector())
    imports = [item.module for item in statements if isinstance(item, config_parser.ImportStatement)]
    packages = dict.fromkeys(module.partition('.')[0] for module in imports)
    return [name for name in packages if name not in ('remixer_t5x', 'remixer_tasks', '__gin__')]


def _is_allowed_name(name: str, imports: dict[str, config_parser.ImportStatement]) -> bool:
    first, _, rest = name.partition('.')
    if first in imports and (imports[first].is_from or imports[first].alias):
        name = f'{imports[first].module}.{rest}'
    module, _, attribute = name.rpartition('.')
    if not _is_allowed_module(module) or attribute.startswith('_'):
        return False
    defined_in = getattr(getattr(importlib.import_module(module), attribute, None), '__module__', '') or ''
    return defined_in in _ALLOWED_MODULES or f'{defined_in}.'.startswith(_ALLOWED_PACKAGES)


def _is_allowed_module(module: str) -> bool:
    try:
        return (
            f'{module}.'.startswith(_ALLOWED_PACKAGES)
            and importlib.util.find_spec(module) is not None
            or module in _ALLOWED_MODULES
        )
    except (ImportError, ValueError):
        return False  # `module` is a class or function in a module.
