"""Evaluates gin's configuration to plain Python values that a later configuration does not change.

gin evaluates the arguments of a factory when the factory is called, and a model calls its factories while it is traced.
A model that gin made would therefore change when a second configuration is loaded. Here every reference becomes a
`functools.partial` of the original function or class with its arguments. Scopes are gin's, except that a factory has
the scope of its reference and no other, wherever it is called.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import gin
from gin.config import ConfigurableReference

from remixer_t5x import ranges
from remixer_t5x.errors import UserError

UNDEFINED = object()
# A finetuning run must set it, to None for random parameters.
_REQUIRED = ('INITIAL_CHECKPOINT_PATH',)
_PLAIN = (bool, int, float, str, type(None), dict, list, tuple)


class Undefined(UserError):
    """A macro that is read and not set."""


class Maker(NamedTuple):
    """Makes a value; with `fresh`, each call makes a new object."""

    make: Callable[[], Any]
    fresh: bool = False


class Walk:
    """Follows the references in values, checks their arguments, and collects the bindings that they read.

    Attributes:
        bindings: values by (scope, selector, argument); macros are (name, 'gin.macro', 'value').
        defaults: values of macros that are not set: the default of the first argument that takes them.
    """

    def __init__(self, deferred: Collection[str] = ()):
        self._deferred = deferred
        self.bindings: dict[tuple[str, str, str], Any] = {}
        self.defaults: dict[str, Any] = {}

    def macro(self, name: str, default: Any = UNDEFINED) -> Any:
        """Returns the value of a macro, possibly a reference."""
        value = raw(name)
        if value is UNDEFINED:
            if name in _REQUIRED or not isinstance(default, _PLAIN):
                raise Undefined(name)
            value = self.defaults.setdefault(name, default)
        self.bindings[name, 'gin.macro', 'value'] = value
        return value

    def maker(self, value: Any, scope: Sequence[str] = ()) -> Maker:
        """Returns a maker of a value under the current configuration."""
        if isinstance(value, dict):
            items = [(self.maker(key, scope), self.maker(item, scope)) for key, item in value.items()]
            fresh = any(part.fresh for item in items for part in item)
            return Maker(lambda: {key.make(): item.make() for key, item in items}, fresh)
        if isinstance(value, list | tuple):
            parts = [self.maker(part, scope) for part in value]
            return Maker(lambda: type(value)(part.make() for part in parts), any(part.fresh for part in parts))
        if not isinstance(value, ConfigurableReference):
            return Maker(lambda: value)
        if _is_macro(value):
            return self.maker(self.macro('/'.join(value.scopes)), value.scopes)
        if value.configurable.selector == 'gin.constant':
            return Maker(value.scoped_configurable_fn)
        function, scope = value.configurable.wrapped, value.scopes or (scope if value.evaluate else [])
        arguments = self.arguments(function, value.configurable.selector, scope)
        if value.evaluate:
            return Maker(lambda: _call(function, arguments, scope), fresh=True)
        return Maker(lambda: _factory(function, arguments))

    def arguments(self, function: Callable[..., Any], selector: str, scope: Sequence[str]) -> dict[str, Maker]:
        """Returns makers of the arguments that are bound in a scope. Raises UserError for values of the wrong type."""
        bound: dict[str, Any] = {}
        for prefix in ('/'.join(scope[:depth]) for depth in range(len(scope) + 1)):
            scoped = f'{prefix}/{selector}'.lstrip('/')
            in_scope = gin.get_bindings(scoped, resolve_references=False, inherit_scopes=False)
            self.bindings |= {(prefix, selector, name): value for name, value in in_scope.items()}
            bound |= in_scope
        makers, parameters = {}, _parameters(function)
        for name, value in bound.items():
            full = f'{function.__module__}.{function.__qualname__}.{name}'
            setting, inner = full.removeprefix('remixer_t5x.'), scope
            while _is_macro(value):
                setting, inner = '/'.join(value.scopes), value.scopes
                value = self.macro(setting, parameters[name].default if name in parameters else UNDEFINED)
            if not isinstance(value, ConfigurableReference):
                ranges.check_argument(function, name, value, setting)
            maker = self.maker(value, inner)
            makers[name] = Maker(functools.partial(functools.cache, maker.make)) if full in self._deferred else maker
        return makers


def raw(name: str) -> Any:
    """Returns the value of a macro, possibly a reference, or UNDEFINED."""
    try:
        return gin.query_parameter(f'%{name}')
    except ValueError:
        return UNDEFINED


def macro(name: str, default: Any = UNDEFINED) -> Any:
    """Returns the evaluated value of a macro, or `default` if it is not set."""
    if default is not UNDEFINED and raw(name) is UNDEFINED:
        return default
    walk = Walk()
    return walk.maker(walk.macro(name)).make()


def call(root: Callable[..., Any] | str, scope: str = '', deferred: Collection[str] = ()) -> Any:
    """Calls a function or class, given as an object or by its full name, with the arguments that gin binds to it.

    For the settings in `deferred`, such as 'module.Class.argument', which take seconds to make, calls get a function in
    place of the value; its first call makes the value.

    Raises:
        UserError: a setting is wrong, or no gin file binds anything to `root`.
    """
    function, scopes = (named(root) if isinstance(root, str) else root), scope.split('/') if scope else []
    if not (arguments := arguments_of(function, scopes, Walk(deferred))):
        raise UserError(f'no gin file given sets up {function.__module__}.{function.__name__}')
    return _call(function, arguments, scopes)


def arguments_of(function: Callable[..., Any], scope: Sequence[str], walk: Walk) -> dict[str, Maker]:
    """Returns makers of the arguments that gin binds to a function or class; empty if gin does not know it."""
    selector = f'{function.__module__}.{function.__name__}'
    try:
        gin.get_bindings(selector, resolve_references=False)
    except ValueError:
        return {}
    return walk.arguments(function, selector, scope)


def named(name: str) -> Any:
    """Returns a function or class by its full name."""
    module, _, attribute = name.rpartition('.')
    return getattr(importlib.import_module(module), attribute)


def _call(function: Callable[..., Any], arguments: dict[str, Maker], scope: Sequence[str]) -> Any:
    parameters = _parameters(function).values()
    missing = [each.name for each in parameters if each.default is each.empty and each.name not in arguments]
    if missing:
        name = function.__name__
        raise UserError(f'{name} needs a value for {", ".join(missing)}; type --gin.{name}.{missing[0]}=VALUE')
    # gin.singleton reads the scope.
    with gin.config_scope(list(scope)):
        return function(**{name: maker.make() for name, maker in arguments.items()})


def _factory(function: Callable[..., Any], arguments: dict[str, Maker]) -> Callable[..., Any]:
    if not any(maker.fresh for maker in arguments.values()):
        values = {name: maker.make() for name, maker in arguments.items()}
        return functools.partial(function, **values) if values else function

    @functools.wraps(function, updated=())
    def factory(*args: Any, **kwargs: Any) -> Any:
        # An argument that is a call is made again for each call of the function: no two layers share a module.
        return function(*args, **({name: maker.make() for name, maker in arguments.items()} | kwargs))

    return factory


def _is_macro(value: Any) -> bool:
    return isinstance(value, ConfigurableReference) and value.configurable.selector == 'gin.macro'


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some functions that are written in C
        return {}
    return {name: each for name, each in parameters.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
