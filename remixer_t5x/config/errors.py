"""gin's exceptions as one line: where, what was given, the nearest name that exists.

gin appends locations and call chains to the text of whatever exception passes through it, so the text is all there is
to go by; the patterns below are those of gin-config 0.5 and `tests/config/test_gin_errors.py` runs the real parser.
"""

import contextlib
import importlib
import inspect
import pkgutil
import re
import traceback
from collections.abc import Callable
from typing import Any

import gin

from remixer_t5x.config.scan import COMMAND_LINE, Scan, nearest
from remixer_t5x.errors import UserError

_PLACE = re.compile(r'In (?:file "(?P<file>.*)",|bindings string) line (?P<line>\d+)')
_CALL = '\n  In call to configurable '
_NO_VALUE = re.compile(r'\n  No values supplied by Gin or caller for arguments: (\[.*\])')


def translate(error: Exception, file: str, scan: Scan) -> UserError | None:
    """The one line for an exception that came out of parsing `file`; None when a module it imports has a bug."""
    if isinstance(error, UserError):
        return error
    place = _PLACE.search(str(error))
    where = file if file.startswith(COMMAND_LINE) else f'{file} line {place["line"]}' if place else file
    reason = str(error).split('\n')[0].strip().strip('"')
    for pattern, explain in _EXPLANATIONS:
        found = re.search(pattern, reason)
        if found:
            return UserError(f'{where}: {explain(*found.groups(), scan)}')
    if not _raised_by_gin(error):
        return None
    kind = next(cls.__name__ for cls in type(error).__mro__ if not cls.__name__.startswith('ExceptionProxy'))
    return UserError(f'{where}: {kind}: {reason}')


def _raised_by_gin(error: Exception) -> bool:
    """gin hands on what it did not raise as well; the innermost frame tells."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get('__name__', '').partition('.')[0] == 'gin'


def _no_module(module: str, scan: Scan) -> str:
    parent, _, name = module.rpartition('.')
    known: list[str] = []
    if parent:
        try:
            path = importlib.import_module(parent).__path__
            known = [f'{parent}.{info.name}' for info in pkgutil.iter_modules(path)]
        except (ImportError, AttributeError):
            known = []
    return f'cannot import {module!r}{nearest(module, known) or "; is the package installed, the name spelt right?"}'


def _no_attribute(selector: str, attribute: str, scan: Scan) -> str:
    owner: Any = None
    try:
        owner = importlib.import_module(scan.full_name(selector).rpartition('.')[0])
    except ImportError:
        return f'{selector!r} does not exist'
    own = [n for n, v in vars(owner).items() if callable(v) and getattr(v, '__module__', '') == owner.__name__]
    hint = nearest(attribute, own) or f'; it has {", ".join(sorted(own)) or "nothing to configure"}'
    return f'{owner.__name__} has no {attribute!r}{hint}'


def _no_import(symbol: str, scan: Scan) -> str:
    hint = nearest(symbol, scan.imports) or f'; add `from ... import {symbol}` at the top of the file'
    return f'{symbol!r} is not imported{hint}'


def _no_configurable(selector: str, scan: Scan) -> str:
    module = _module_of(selector, scan)
    if module:
        package, _, name = module.rpartition('.')
        lines = f'`from __gin__ import dynamic_registration` and `from {package} import {name}`'
        return f'{selector!r} is not imported in this file; add the lines {lines} to it'
    known = scan.selectors()
    short = {name.rpartition('.')[2]: name for name in known}
    hint = nearest(selector, known) or nearest(selector.rpartition('.')[2], short)
    return f'nothing called {selector!r} is used by the gin files given{hint or "; name it as module.Class"}'


def _no_parameter(selector: str, parameter: str, scan: Scan) -> str:
    known = _parameters(selector, scan)
    hint = nearest(parameter, known) or (f'; it has {", ".join(known)}' if known else '')
    return f'{selector} has no setting {parameter!r}{hint}'


def _parameters(selector: str, scan: Scan) -> list[str]:
    """Settings of a configurable; a flax module's `parent` and `name` are not the user's to give."""
    try:
        configurable: Callable[..., Any] = gin.get_configurable(scan.full_name(selector))
    except (KeyError, ValueError):
        try:
            configurable = gin.get_configurable(selector)
        except (KeyError, ValueError):
            return []
    # gin's stand-in for a class hides the signature of the class itself behind (*args, **kwargs).
    function = configurable.__init__ if inspect.isclass(configurable) else configurable
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []
    return [name for name in names if name not in ('self', 'parent', 'name')]


def _ambiguous(selector: str, matches: str, scan: Scan) -> str:
    return f'{selector!r} could be any of {matches}; write more of the name'


_EXPLANATIONS: list[tuple[str, Callable[..., str]]] = [
    (r"No module named '([^']*)'", _no_module),
    (r"Couldn't resolve selector (\S+); .* has no attribute (\w+)", _no_attribute),
    (r"'(\w+)' was not provided by an import statement", _no_import),
    (r"No configurable matching (?:reference )?'@?([^'()]*)", _no_configurable),
    (r"Configurable '([^']*)' doesn't have a parameter named '([^']*)'", _no_parameter),
    (r"Ambiguous selector '([^']*)', matches \[(.*)\]", _ambiguous),
]


def translate_call(error: Exception) -> UserError | None:
    """One line for an exception from calling a configurable; None if it is not a user's mistake."""
    text = str(error)
    if isinstance(error, UserError):
        return UserError(text.split(_CALL)[0].strip())
    missing = _NO_VALUE.search(text)
    if isinstance(error, TypeError) and missing:
        name = re.search(_CALL + r"'([^']*)'", text)
        caller = name[1] if name else 'a function'
        return UserError(f'{caller} needs a value for {missing[1][1:-1]}; bind it in a gin file')
    required = re.match(r'Required bindings for `([^`]*)` not provided in config: \[(.*?)\]', text)
    if required:
        return UserError(f'{required[1]} needs a value for {required[2]}; bind it in a gin file')
    return None


def _module_of(selector: str, scan: Scan) -> str:
    """The module that has what `selector` means, where another file has imported it; empty otherwise."""
    first, _, attribute = selector.rpartition('/')[2].partition('.')
    for binding in scan.bindings:
        module = binding.target.rpartition('.')[0]
        if module.endswith(f'.{first}') and attribute:
            with contextlib.suppress(ImportError):
                return module if callable(getattr(importlib.import_module(module), attribute, None)) else ''
    return ''
