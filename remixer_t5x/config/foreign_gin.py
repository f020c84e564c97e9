"""Whether gin text only describes a model of ours. gin runs code, so other text of a stranger needs the user's consent.

Allowed are literals, macros, and functions and classes that are defined in the modules below, by their own names; they
build models and read vocabularies.
"""

import importlib
import importlib.util
import tokenize

from gin import config_parser

from remixer_t5x.errors import UserError, one_line

_PACKAGES = ('remixer_t5x.models.',)
_MODULES = ('remixer_tasks.vocabularies',)
_GIN = '__gin__.dynamic_registration'


class _References(config_parser.ParserDelegate):
    """Collects the classes and functions that values refer to, without looking them up."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        self.names.append(scoped_configurable_name.rpartition('/')[2])

    def macro(self, macro_name: str) -> None:
        """Macros are allowed."""


def first_foreign(text: str, file: str) -> str:
    """The first import, include, function or class in `text` that is not allowed; empty if there is none.

    Imports no module except for the allowed ones. Raises UserError, with the name `file`, if the text is not gin.
    """
    references, imports = _References(), {}
    try:
        for statement in config_parser.ConfigParser(text, references):
            if isinstance(statement, config_parser.IncludeStatement):
                return f'include {statement.filename!r}'
            if isinstance(statement, config_parser.ImportStatement):
                if statement.module != _GIN and not _is_ours(statement.module):
                    return statement.format()
                imports[statement.bound_name()] = statement
                continue
            if isinstance(statement, config_parser.BlockDeclaration) or statement.arg_name:
                references.names.append(statement.selector)
            for name in references.names:
                if not _is_allowed(name, imports):
                    return name
            references.names.clear()
    except (SyntaxError, ValueError, tokenize.TokenError) as error:
        raise UserError(f'{file} is not gin: {one_line(str(error))}; copy the file again') from None
    return ''


def _is_allowed(name: str, imports: dict[str, config_parser.ImportStatement]) -> bool:
    first, _, rest = name.partition('.')
    if first in imports and (imports[first].is_from or imports[first].alias):
        name = f'{imports[first].module}.{rest}'
    module, _, attribute = name.rpartition('.')
    if not _is_ours(module) or attribute.startswith('_'):
        return False
    defined_in = getattr(getattr(importlib.import_module(module), attribute, None), '__module__', '') or ''
    return defined_in in _MODULES or f'{defined_in}.'.startswith(_PACKAGES)


def _is_ours(module: str) -> bool:
    try:
        return f'{module}.'.startswith(_PACKAGES) and importlib.util.find_spec(module) is not None or module in _MODULES
    except (ImportError, ValueError):
        return False  # An attribute of one of the modules.
