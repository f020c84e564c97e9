"""Values of gin's configuration as plain Python: after this, another configuration changes them no more.

gin evaluates a factory's arguments when the factory is called, and a model calls its factories while it is traced. A
model that gin made would therefore change when a second configuration is loaded. Here every reference becomes a
`functools.partial` of the original function or class with its arguments in it. Scopes are gin's: what is called within
`@scope/name` has the settings of the scope.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gin
from gin.config import ConfigurableReference

from remixer_t5x.config import kinds
from remixer_t5x.errors import UserError

# Makes a value as the configuration was when it was planned.
Plan = Callable[[], Any]
_DEFERRED: set[str] = set()

# No default is given.
_REQUIRED = object()


def macro(name: str, default: Any = _REQUIRED) -> Any:
    """The value of a macro, or `default` if the configuration does not read the macro.

    Raises:
        UserError: from what the value calls.
        ValueError: the configuration does not read the macro, and there is no default.
    """
    try:
        value = gin.query_parameter(f'%{name}')
    except ValueError:
        if default is _REQUIRED:
            raise
        return default
    return _plan(value, name.split('/'), [])()


def call(root: Callable[..., Any] | str, scope: str = '') -> Any:
    """Calls a function or class, given as an object or by its full name, with the arguments that gin binds to it.

    Raises:
        UserError: what a user did wrong, on one line; also when no gin file binds anything to `root`.
    """
    function = _named(root) if isinstance(root, str) else root
    scopes = scope.split('/') if scope else []
    try:
        with gin.config_scope(scopes):
            bindings = gin.get_bindings(function, resolve_references=False)
    except ValueError:
        bindings = {}
    if not bindings:
        raise UserError(f'no gin file given sets up {function.__module__}.{function.__name__}')
    return _call(function, _plans(function, bindings, scopes), scopes)


@contextlib.contextmanager
def deferred(setting: str) -> Iterator[None]:
    """Within, calls get a function in place of the value of a setting such as 'module.Class.argument'; its first call
    makes the value, as the configuration is now. For values that take seconds to make.
    """
    _DEFERRED.add(setting)
    try:
        yield
    finally:
        _DEFERRED.remove(setting)


def _named(root: str) -> Any:
    module, _, name = root.rpartition('.')
    return getattr(importlib.import_module(module), name)


def _plan(value: Any, scope: list[str], factory_scope: list[str]) -> Plan:
    """How to make `value`. Where a reference names no scope, a call takes `scope`, and a factory takes `factory_scope`
    if it is called while that scope lasts.
    """
    if isinstance(value, ConfigurableReference):
        if value.evaluate or value.scopes or not factory_scope:
            return _plan_reference(value, value.scopes or (scope if value.evaluate else []), factory_scope)
        later, within = _plan_reference(value, [], []), _plan_reference(value, factory_scope, [])
        return lambda: _by_scope(value.configurable.wrapped, later(), within(), factory_scope)
    if isinstance(value, dict):
        items = [(_plan(key, scope, factory_scope), _plan(item, scope, factory_scope)) for key, item in value.items()]
        return lambda: {key(): item() for key, item in items}
    if isinstance(value, list | tuple):
        plans = [_plan(child, scope, factory_scope) for child in value]
        return lambda: type(value)(plan() for plan in plans)
    return lambda: value


def _plans(function: Callable[..., Any], bindings: Mapping[str, Any], scope: list[str]) -> dict[str, Plan]:
    """How to make the arguments of a function or class that is called within `scope`."""
    # A function may call its factories while the scope lasts, an object calls them later.
    factory_scope = [] if inspect.isclass(function) else scope
    for name, value in bindings.items():
        _check_kind(function, name, value)
    plans = {name: _plan(value, scope, factory_scope) for name, value in bindings.items()}
    for name in plans:
        if f'{function.__module__}.{function.__qualname__}.{name}' in _DEFERRED:
            plans[name] = functools.partial(functools.cache, plans[name])
    return plans


def _check_kind(function: Callable[..., Any], name: str, value: Any) -> None:
    setting = f'{function.__module__}.{function.__qualname__}.{name}'.removeprefix('remixer_t5x.')
    while isinstance(value, ConfigurableReference) and value.configurable.selector == 'gin.macro':
        setting = '/'.join(value.scopes)
        value = gin.query_parameter(f'%{setting}')
    kinds.check(function, name, value, setting)


def _plan_reference(reference: ConfigurableReference, scope: list[str], factory_scope: list[str]) -> Plan:
    function, selector = reference.configurable.wrapped, reference.configurable.selector
    bindings = gin.get_bindings('/'.join([*scope, selector]), resolve_references=False)
    if selector == 'gin.macro':
        return _plan(bindings['value'], scope, factory_scope)
    plans = _plans(function, bindings, scope)
    if reference.evaluate:
        return lambda: _call(function, plans, scope)
    return lambda: _factory(function, plans, scope, _evaluates(list(bindings.values())))


def _factory(function: Callable[..., Any], plans: Mapping[str, Plan], scope: list[str], evaluates: bool) -> Any:
    made = {} if evaluates else _made(plans)
    if not evaluates and (not scope or inspect.isclass(function)):
        return functools.partial(function, **made) if made else function

    @functools.wraps(function, updated=())
    def factory(*args: Any, **given: Any) -> Any:
        with gin.config_scope(scope):
            # An argument that is a call is made again for each call of the function.
            return function(*args, **{**(_made(plans) if evaluates else made), **given})

    return factory


def _by_scope(
    function: Callable[..., Any], later: Callable[..., Any], within: Callable[..., Any], scope: list[str]
) -> Callable[..., Any]:
    @functools.wraps(function, updated=())
    def factory(*args: Any, **given: Any) -> Any:
        return (within if gin.current_scope() == scope else later)(*args, **given)

    return factory


def _evaluates(value: Any) -> bool:
    if isinstance(value, ConfigurableReference):
        is_macro = value.configurable.selector == 'gin.macro'
        return _evaluates(gin.query_parameter(f'%{"/".join(value.scopes)}')) if is_macro else value.evaluate
    children = [*value, *value.values()] if isinstance(value, dict) else value
    return isinstance(value, dict | list | tuple) and any(map(_evaluates, children))


def _made(plans: Mapping[str, Plan]) -> dict[str, Any]:
    return {name: plan() for name, plan in plans.items()}


def _call(function: Callable[..., Any], plans: Mapping[str, Plan], scope: list[str]) -> Any:
    if missing := [name for name in _required(function) if name not in plans]:
        name, wanted = function.__name__, ', '.join(map(repr, missing))
        raise UserError(
            f'{name} needs a value for {wanted}; bind it in a gin file, or type --gin.{name}.{missing[0]}=VALUE'
        )
    # Builtins of gin, and functions that call gin's configurables themselves, read the scope.
    with gin.config_scope(scope):
        return function(**_made(plans))


def _required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some functions that are written in C
        return []
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    return [one.name for one in named if one.default is one.empty or one.default is gin.REQUIRED]
