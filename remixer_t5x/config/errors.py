"""gin's exceptions as one line: where, what was given, the nearest name that exists.

gin appends locations and call chains to the text of whatever exception passes through it, so the text is all there is
to go by; the patterns below are those of gin-config 0.5 and `tests/config/test_gin_errors.py` runs the real parser.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import re
import traceback
from collections.abc import Callable
from typing import Any

import gin

from remixer_t5x.config import t5x_macros
from remixer_t5x.config.bindings import Bindings
from remixer_t5x.config.files import nearest, sublayer_file
from remixer_t5x.config.scan import COMMAND_LINE, Imports, Place, full_name
from remixer_t5x.errors import UserError

_NO_MODULE = '; is the name spelt right, the package installed, or its folder in PYTHONPATH?'


@dataclasses.dataclass(frozen=True)
class Known:
    """What a name in a statement may mean: all bindings, and the imports of the statement's file."""

    bindings: Bindings
    imports: Imports


def translate(error: Exception, place: Place, known: Known) -> UserError | None:
    """The one line for an exception that gin raised for the statement at `place`; None for a bug in a module that the
    statement imports.
    """
    reason = str(error).split('\n')[0].strip().strip('"')
    for pattern, explain in _EXPLANATIONS:
        found = re.search(pattern, reason)
        if found:
            return UserError(f'{place}: {_setting_of_t5x(place) or explain(*found.groups(), known)}')
    if not _raised_by_gin(error):
        return None
    kind = next(cls.__name__ for cls in type(error).__mro__ if not cls.__name__.startswith('ExceptionProxy'))
    return UserError(f'{place}: {kind}: {reason}')


def _setting_of_t5x(place: Place) -> str:
    name = place.file.removeprefix(COMMAND_LINE) if place.on_command_line else ''
    return t5x_macros.setting_here(name)


def _raised_by_gin(error: Exception) -> bool:
    """gin hands on what it did not raise as well; the innermost frame tells."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get('__name__', '').partition('.')[0] == 'gin'


def _no_module(module: str, known: Known) -> str:
    parent = module.rpartition('.')[0]
    modules: list[str] = []
    if parent:
        try:
            path = importlib.import_module(parent).__path__
            modules = [f'{parent}.{info.name}' for info in pkgutil.iter_modules(path)]
        except (ImportError, AttributeError):
            modules = []
    return f'cannot import {module!r}{nearest(module, modules) or _NO_MODULE}'


def _no_attribute(selector: str, attribute: str, known: Known) -> str:
    owner: Any = None
    try:
        owner = importlib.import_module(full_name(selector, known.imports).rpartition('.')[0])
    except ImportError:
        return f'{selector!r} does not exist'
    public = {name: value for name, value in vars(owner).items() if not name.startswith('_')}
    own = [n for n, v in public.items() if callable(v) and getattr(v, '__module__', '') == owner.__name__]
    hint = nearest(attribute, own) or f'; it has {", ".join(sorted(own)) or "nothing to configure"}'
    return f'{owner.__name__} has no {attribute!r}{hint}'


def _no_import(symbol: str, known: Known) -> str:
    hint = nearest(symbol, known.imports) or f'; add `from ... import {symbol}` at the top of the file'
    return f'{symbol!r} is not imported{hint}'


def _no_configurable(selector: str, known: Known) -> str:
    symbol, _, attribute = selector.rpartition('/')[2].partition('.')
    elsewhere = known.bindings.imports.get(symbol)
    if elsewhere and attribute:
        lines = f'`from __gin__ import dynamic_registration` and `{elsewhere.format()}`'
        return f'{selector!r} is not imported in this file; add the lines {lines} to it'
    if file := sublayer_file(symbol):
        return f'nothing called {selector!r} is used by the gin files given; add --gin_file={file}'
    selectors = known.bindings.selectors()
    short = {name.rpartition('.')[2]: name for name in selectors}
    hint = nearest(selector, selectors) or nearest(selector.rpartition('.')[2], short)
    hint = hint or (f'; {symbol!r} cannot be imported{_NO_MODULE}' if attribute else '; name it as module.Class')
    return f'nothing called {selector!r} is used by the gin files given{hint}'


def _no_parameter(selector: str, parameter: str, known: Known) -> str:
    parameters = _parameters(full_name(selector, known.imports)) or _parameters(selector)
    hint = nearest(parameter, parameters) or (f'; it has {", ".join(parameters)}' if parameters else '')
    return f'{selector} has no setting {parameter!r}{hint}'


def _parameters(selector: str) -> list[str]:
    """Settings of a configurable; a flax module's `parent` and `name` are not the user's to give."""
    try:
        configurable: Callable[..., Any] = gin.get_configurable(selector)
        # gin's stand-in for a class hides the signature of the class itself behind (*args, **kwargs).
        function = configurable.__init__ if inspect.isclass(configurable) else configurable
        names = list(inspect.signature(function).parameters)
    except (KeyError, TypeError, ValueError):
        return []
    return [name for name in names if name not in ('self', 'parent', 'name')]


def _ambiguous(selector: str, matches: str, known: Known) -> str:
    return f'{selector!r} could be any of {matches}; write more of the name'


_EXPLANATIONS: list[tuple[str, Callable[..., str]]] = [
    (r"No module named '([^']*)'", _no_module),
    (r"Couldn't resolve selector (\S+); .* has no attribute (\w+)", _no_attribute),
    (r"'(\w+)' was not provided by an import statement", _no_import),
    (r"No configurable matching (?:reference )?'@?([^'()]*)", _no_configurable),
    (r"Configurable '([^']*)' doesn't have a parameter named '([^']*)'", _no_parameter),
    (r"Ambiguous selector '([^']*)', matches \[(.*)\]", _ambiguous),
]
