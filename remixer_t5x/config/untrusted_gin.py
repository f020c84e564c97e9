"""Checks that untrusted gin text only configures models of this package, because gin can call any function.

Literals, macros, and the classes and functions defined in `_ALLOWED_PACKAGES` and `_ALLOWED_MODULES` are allowed.
"""

import importlib
import importlib.util

from gin import config_parser
from gin.config_parser import ImportStatement

from remixer_t5x.config import gin_files, loading
from remixer_t5x.errors import UserError, to_one_line

_ALLOWED_PACKAGES = ('remixer_t5x.models.',)
_ALLOWED_MODULES = ('remixer_tasks.vocabularies',)
_DYNAMIC_REGISTRATION = '__gin__.dynamic_registration'


def find_disallowed_statement(text: str, file: str) -> str:
    """Returns the first import, include, macro, function or class that is not allowed, or '' if all are allowed.

    Imports only allowed modules. Raises a UserError that names `file` if the text is not valid gin.
    """
    # Reading a file as text can convert control characters to line breaks, which would end a comment.
    if unprintable := next((line for line in text.split('\n') if not line.replace('\t', ' ').isprintable()), None):
        raise UserError(
            f'{file} must contain only printable characters, got {to_one_line(unprintable):.80}; restore the original '
            'file'
        )
    imports: dict[str, ImportStatement] = {}
    for statement, references in gin_files.GinText(file, text).statements:
        if isinstance(statement, config_parser.IncludeStatement):
            return f'include {statement.filename!r}'
        if isinstance(statement, ImportStatement):
            if statement.module != _DYNAMIC_REGISTRATION and not _is_allowed_module(statement.module):
                return statement.format()
            imports[statement.bound_name()] = statement
            continue
        names = [name[1:].rpartition('/')[2] for name in references if name[0] == '@']
        if isinstance(statement, config_parser.BlockDeclaration) or statement.arg_name:
            names.append(statement.selector)
        elif statement.selector == loading.MODULE:
            return loading.MODULE
        if foreign := next((name for name in names if not _is_allowed_name(name, imports)), ''):
            return foreign
    return ''


def find_imported_packages(text: str) -> list[str]:
    """Returns the top-level packages that the gin text imports, except for the packages of this project."""
    imports = gin_files.GinText('', text).imports.values()
    packages = dict.fromkeys(statement.module.partition('.')[0] for statement in imports)
    return [name for name in packages if name not in ('remixer_t5x', 'remixer_tasks')]


def _is_allowed_name(name: str, imports: dict[str, ImportStatement]) -> bool:
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
