"""Whether gin text only describes a model of ours. gin runs code, so other text of a stranger needs the user's consent.

Allowed are literals, macros, and functions and classes that are defined in the modules below, by their own names; they
build models and read vocabularies.
"""

import importlib
import importlib.util
from collections.abc import Iterator

from gin.config_parser import ImportStatement, IncludeStatement

from remixer_t5x.config import scan

_PACKAGES = ('remixer_t5x.models.',)
_MODULES = ('remixer_tasks.vocabularies',)
_GIN = '__gin__.dynamic_registration'


def first_foreign(text: str, file: str) -> str:
    """The first import, include, function or class in `text` that is not allowed; empty if there is none.

    Imports no module except for the allowed ones. Raises UserError, with the name `file`, if the text is not gin.
    """
    for statement in scan.scan(text, file):
        if isinstance(statement, IncludeStatement):
            return f'include {statement.filename!r}'
        if isinstance(statement, ImportStatement):
            if statement.module != _GIN and not _is_ours(statement.module):
                return statement.format()
            continue
        for target in _targets(statement):
            module, _, name = target.rpartition('.')
            if not _is_ours(module) or not _defines(module, name):
                return target
    return ''


def imported_packages(text: str, file: str) -> list[str]:
    """Top-level names of the modules that `text` imports and that are not part of this package, each once."""
    statements = [one for one in scan.scan(text, file) if isinstance(one, ImportStatement) and one.module != _GIN]
    names = dict.fromkeys(statement.module.partition('.')[0] for statement in statements)
    return [name for name in names if name not in ('remixer_t5x', 'remixer_tasks')]


def _targets(binding: scan.Binding) -> Iterator[str]:
    if not binding.is_macro:
        yield binding.target
    yield from (reference.target for reference in binding.references() if reference.kind == '@')


def _is_ours(module: str) -> bool:
    try:
        return f'{module}.'.startswith(_PACKAGES) and importlib.util.find_spec(module) is not None or module in _MODULES
    except (ImportError, ValueError):
        return False  # An attribute of one of the modules.


def _defines(module: str, name: str) -> bool:
    value = getattr(importlib.import_module(module), name, None)
    defined_in = getattr(value, '__module__', '') or ''
    return not name.startswith('_') and (defined_in in _MODULES or f'{defined_in}.'.startswith(_PACKAGES))
