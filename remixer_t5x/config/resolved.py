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
from remixer_t5x.config import files
from remixer_t5x.errors import UserError

UNDEFINED = object()
# A finetuning run must set it, to None for random parameters.
_REQUIRED = ('INITIAL_CHECKPOINT_PATH',)
_PLAIN = (bool, int, float, str, type(None), dict, list, tuple)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


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
        """Returns the value of a macro, possibly a reference. Raises UserError if it has no value and no default."""
        value = raw_macro(name)
        if value is UNDEFINED:
            if name in _REQUIRED or not isinstance(default, _PLAIN):
                raise UserError(f'%{name} is not set{files.advise_file(name) or f"; type {files.FLAG}{name}=VALUE"}')
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
        makers, parameters = {}, inspect.signature(function).parameters
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

    def root(self, function: Callable[..., Any] | str, scope: Sequence[str] = ()) -> dict[str, Maker]:
        """Returns makers of the arguments of a function or class that the caller calls, given itself or by its name."""
        selector = function if isinstance(function, str) else f'{function.__module__}.{function.__name__}'
        try:
            gin.get_bindings(selector, resolve_references=False)
        except ValueError:
            arguments = {}
        else:
            arguments = self.arguments(
                import_by_name(function) if isinstance(function, str) else function, selector, scope
            )
        if not arguments:
            short = '.'.join(selector.split('.')[-2:])
            raise UserError(f'no gin file given sets up {selector}{files.advise_file(short)}')
        return arguments


def raw_macro(name: str) -> Any:
    """Returns the value of a macro, possibly a reference, or UNDEFINED."""
    try:
        return gin.query_parameter(f'%{name}')
    except ValueError:
        return UNDEFINED


def macro(name: str, default: Any = UNDEFINED) -> Any:
    """Returns the evaluated value of a macro, or `default` if it is not set."""
    if default is not UNDEFINED and raw_macro(name) is UNDEFINED:
        return default
    walk = Walk()
    return walk.maker(walk.macro(name)).make()


def call_configured(root: Callable[..., Any] | str, scope: str = '', deferred: Collection[str] = ()) -> Any:
    """Calls a function or class, given itself or by its full name, with the arguments that gin binds to it.

    For the settings in `deferred`, such as 'module.Class.argument', which take seconds to make, calls get a function in
    place of the value; its first call makes the value. Raises UserError if a setting is wrong, or if nothing is bound.
    """
    scopes = scope.split('/') if scope else []
    function = import_by_name(root) if isinstance(root, str) else root
    return _call(function, Walk(deferred).root(function, scopes), scopes)


def import_by_name(name: str) -> Any:
    """Returns a function or class by its full name."""
    module, _, attribute = name.rpartition('.')
    return getattr(importlib.import_module(module), attribute)


def _call(function: Callable[..., Any], arguments: dict[str, Maker], scope: Sequence[str]) -> Any:
    parameters = inspect.signature(function).parameters.values()
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in _VARIADIC]
    if missing := [name for name in required if name not in arguments]:
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
