"""Values of gin's configuration as plain Python: after this, another configuration changes them no more.

gin evaluates a factory's arguments when the factory is called, and a model calls its factories while it is traced. A
model that gin made would therefore change when a second configuration is loaded. Here every reference becomes a
`functools.partial` of the original function or class with its arguments in it.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import gin
from gin.config import ConfigurableReference

from remixer_t5x.config import loading
from remixer_t5x.errors import UserError


def macro(name: str, objects: Mapping[str, Any] | None = None) -> Any:
    """The value of the macro `name`.

    Args:
        name: of a macro in gin's configuration.
        objects: Python values that replace macros, by name.

    Raises:
        UserError: no gin file defines the macro.
    """
    if not has_macro(name):
        raise UserError(f'no gin file given sets {name}')
    return _resolved(gin.query_parameter(f'%{name}'), objects or {})


def has_macro(name: str) -> bool:
    """Whether gin's configuration defines the macro."""
    try:
        gin.query_parameter(f'%{name}')
    except ValueError:
        return False
    return True


def call_in_scope(scope: str, function: Callable[..., Any]) -> Any:
    """`loading.call` within the scope; raises UserError also where no gin file configures `function`."""
    with gin.config_scope(scope):
        return loading.call(function)


def _resolved(value: Any, objects: Mapping[str, Any]) -> Any:
    if isinstance(value, ConfigurableReference):
        return _resolved_reference(value, objects)
    if isinstance(value, dict):
        return {key: _resolved(child, objects) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resolved(child, objects) for child in value)
    return value


def _resolved_reference(reference: ConfigurableReference, objects: Mapping[str, Any]) -> Any:
    scope, selector = reference.config_key
    if selector == 'gin.macro' and scope in objects:
        return objects[scope]
    bindings = gin.get_bindings('/'.join(filter(None, (scope, selector))), resolve_references=False)
    arguments = {name: _resolved(value, objects) for name, value in bindings.items()}
    made = (
        functools.partial(reference.configurable.wrapped, **arguments) if arguments else reference.configurable.wrapped
    )
    return made() if reference.evaluate else made
