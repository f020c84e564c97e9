"""Evaluates the gin configuration to Python values, which do not change when another configuration is loaded.

gin evaluates the arguments of a factory when the factory is called. Models call factories while they are traced, so a
model created by gin would change with the configuration. Therefore, this module replaces references with
`functools.partial` objects of the original functions and classes. Scopes work as in gin, except that a factory is
always called in the scope of its reference.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import gin
from gin.config import ConfigurableReference

from remixer_t5x import ranges
from remixer_t5x.config import gin_files
from remixer_t5x.errors import UserError

UNDEFINED = object()
# Macros that must be set explicitly. INITIAL_CHECKPOINT_PATH = None selects randomly initialized parameters.
_REQUIRED = ('INITIAL_CHECKPOINT_PATH',)
_PLAIN_TYPES = (bool, int, float, str, type(None), dict, list, tuple)
_VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class ValueBuilder(NamedTuple):
    """A function that creates a value; if `fresh` is true, each call creates a new object."""

    build: Callable[[], Any]
    fresh: bool = False


class ReferenceResolver:
    """Resolves gin references, checks the arguments that they bind, and collects the bindings that they read.

    Attributes:
        bindings: bound values keyed by (scope, selector, argument). The key of a macro is (name, 'gin.macro', 'value').
        defaults: maps each unset macro to the default value of the first argument that is bound to the macro.
    """

    def __init__(self, deferred: Collection[str] = ()):
        self._deferred = deferred
        self.bindings: dict[tuple[str, str, str], Any] = {}
        self.defaults: dict[str, Any] = {}

    def get_macro(self, name: str, default: Any = UNDEFINED) -> Any:
        """Returns the value of a macro, which may be a reference.

        Raises UserError if the macro is not set and has no default value.
        """
        value = get_unevaluated_macro(name)
        if value is UNDEFINED:
            if name in _REQUIRED or not isinstance(default, _PLAIN_TYPES):
                raise UserError(
                    f'%{name} is not set{gin_files.suggest_file(name) or f"; pass {gin_files.FLAG}{name}=VALUE"}'
                )
            value = self.defaults.setdefault(name, default)
        self.bindings[name, 'gin.macro', 'value'] = value
        return value

    def create_value_builder(self, value: Any, scope: Sequence[str] = ()) -> ValueBuilder:
        """Returns a ValueBuilder for a value, with references resolved in the current configuration."""
        if isinstance(value, dict):
            items = self.create_value_builder(list(value.items()), scope)
            return ValueBuilder(lambda: dict(items.build()), items.fresh)
        if isinstance(value, list | tuple):
            parts = [self.create_value_builder(part, scope) for part in value]
            return ValueBuilder(lambda: type(value)(part.build() for part in parts), any(part.fresh for part in parts))
        if not isinstance(value, ConfigurableReference):
            return ValueBuilder(lambda: value)
        if _is_macro(value):
            return self.create_value_builder(self.get_macro('/'.join(value.scopes)), value.scopes)
        if value.configurable.selector == 'gin.constant':
            return ValueBuilder(value.scoped_configurable_fn)
        function, scope = value.configurable.wrapped, value.scopes or (scope if value.evaluate else [])
        arguments = self.resolve_arguments(function, value.configurable.selector, scope)
        if value.evaluate:
            return ValueBuilder(lambda: _call_with_arguments(function, arguments, scope), fresh=True)
        return ValueBuilder(lambda: _bind_factory_arguments(function, arguments))

    def resolve_arguments(
        self, function: Callable[..., Any], selector: str, scope: Sequence[str]
    ) -> dict[str, ValueBuilder]:
        """Returns ValueBuilders for arguments bound in a gin scope. Raises UserError for a value of the wrong type."""
        bound: dict[str, Any] = {}
        for prefix in ('/'.join(scope[:depth]) for depth in range(len(scope) + 1)):
            scoped = f'{prefix}/{selector}'.lstrip('/')
            in_scope = gin.get_bindings(scoped, resolve_references=False, inherit_scopes=False)
            self.bindings |= {(prefix, selector, name): value for name, value in in_scope.items()}
            bound |= in_scope
        builders, parameters = {}, inspect.signature(function).parameters
        for name, value in bound.items():
            full = f'{function.__module__}.{function.__qualname__}.{name}'
            setting, inner = full.removeprefix('remixer_t5x.'), scope
            while _is_macro(value):
                setting, inner = '/'.join(value.scopes), value.scopes
                value = self.get_macro(setting, parameters[name].default if name in parameters else UNDEFINED)
            kind = ranges.get_annotation(function, name)
            self._check_value(value, kind, setting)
            builder = self.create_value_builder(value, inner)
            builders[name] = (
                ValueBuilder(functools.partial(functools.cache, builder.build)) if full in self._deferred else builder
            )
        return builders

    def _check_value(self, value: Any, kind: Any, setting: str) -> None:
        """Raises UserError if a value, or an item of a list, does not match an annotation."""
        while _is_macro(value):
            setting = '/'.join(value.scopes)
            value = self.get_macro(setting)
        if isinstance(value, ConfigurableReference):
            ranges.check_reference(setting, value.configurable.wrapped, value.evaluate, kind)
            return
        ranges.check_setting(setting, value, kind)
        if isinstance(value, list | tuple):
            for item, item_kind in ranges.match_items(value, kind):
                self._check_value(item, item_kind, setting)

    def resolve_root_arguments(self, selector: str, scope: Sequence[str] = ()) -> dict[str, ValueBuilder]:
        """Returns ValueBuilders for the bound arguments of `selector`. Raises UserError if gin binds no argument."""
        try:
            gin.get_bindings(selector, resolve_references=False)
        except ValueError:
            arguments = {}
        else:
            arguments = self.resolve_arguments(import_by_name(selector), selector, scope)
        if not arguments:
            short = '.'.join(selector.split('.')[-2:])
            raise UserError(f'a gin file must configure {selector}{gin_files.suggest_file(short)}')
        return arguments


def get_unevaluated_macro(name: str) -> Any:
    """Returns the unevaluated value of a macro, which may be a reference, or UNDEFINED if the macro is not set."""
    try:
        return gin.query_parameter(f'%{name}')
    except ValueError:
        return UNDEFINED


def evaluate_macro(name: str, default: Any = UNDEFINED) -> Any:
    """Returns the evaluated value of a macro, or `default` if it is not set."""
    if default is not UNDEFINED and get_unevaluated_macro(name) is UNDEFINED:
        return default
    resolver = ReferenceResolver()
    return resolver.create_value_builder(resolver.get_macro(name)).build()


def call_configured(root: Callable[..., Any] | str, scope: str = '', deferred: Collection[str] = ()) -> Any:
    """Calls `root`, a function or class or the full name of one, with the arguments that gin binds to it.

    Arguments in `deferred`, such as 'module.Class.argument', are passed as functions that create the value when they
    are first called. Raises UserError if an argument is invalid, or if gin binds no argument.
    """
    scopes = scope.split('/') if scope else []
    selector = root if isinstance(root, str) else f'{root.__module__}.{root.__name__}'
    return _call_with_arguments(
        import_by_name(selector), ReferenceResolver(deferred).resolve_root_arguments(selector, scopes), scopes
    )


def import_by_name(name: str) -> Any:
    """Imports a function or class by its full name."""
    module, _, attribute = name.rpartition('.')
    return getattr(importlib.import_module(module), attribute)


def _call_with_arguments(function: Callable[..., Any], arguments: dict[str, ValueBuilder], scope: Sequence[str]) -> Any:
    parameters = inspect.signature(function).parameters.values()
    required = [each.name for each in parameters if each.default is each.empty and each.kind not in _VARIADIC_KINDS]
    if missing := [name for name in required if name not in arguments]:
        name = function.__name__
        raise UserError(f'{name} must have values for {", ".join(missing)}; pass --gin.{name}.{missing[0]}=VALUE')
    # Enter the scope, because gin.singleton depends on the active scope.
    with gin.config_scope(list(scope)):
        return function(**{name: builder.build() for name, builder in arguments.items()})


def _bind_factory_arguments(function: Callable[..., Any], arguments: dict[str, ValueBuilder]) -> Callable[..., Any]:
    if not any(builder.fresh for builder in arguments.values()):
        values = {name: builder.build() for name, builder in arguments.items()}
        return functools.partial(function, **values) if values else function

    @functools.wraps(function, updated=())
    def factory(*args: Any, **kwargs: Any) -> Any:
        # Evaluate references of the form @f() for each call of the factory, so that no two layers share a module.
        return function(*args, **({name: builder.build() for name, builder in arguments.items()} | kwargs))

    return factory


def _is_macro(value: Any) -> bool:
    return isinstance(value, ConfigurableReference) and value.configurable.selector == 'gin.macro'
