"""Records the modules of a model while Flax initializes it, so that all gin settings are resolved."""

import dataclasses
import inspect
import math
from typing import Any

from flax import linen as nn
from flax import traverse_util

from remixer_t5x import ranges
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.param_mapping import LayerIndices
from remixer_t5x.models import interface
from remixer_t5x.models.architecture.layer import Block
from remixer_t5x.models.interface import Model

# Fields that, like dropout rates, do not change what a module computes from its parameters, except for rounding.
TRAINING_FIELDS = ('attention', 'axes', 'dtype', 'kernel_init', 'name', 'one_hot', 'remat_policy', 'stddev', 'unroll')


class UnsupportedModelError(UserError):
    """Raised if another format cannot represent a model; `reason` describes the first difference."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f'{reason}; --to_safetensors=FILE writes the parameters of any model')


def record_modules(model: Model) -> tuple[dict[str, nn.Module], dict[str, tuple[int, ...]]]:
    """Returns the modules of a model and the shapes of its parameters, both keyed by path.

    A path is, for example, `encoder/run_0/layer/remixer`. Omits dropout, and modules that only contain layers.
    """
    modules: dict[str, nn.Module] = {}

    def record_module(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        path = context.module.path
        if not isinstance(context.module, nn.Dropout | Block) and not (path and path[-1].startswith('run_')):
            modules.setdefault('/'.join(path), context.module)
        return call(*args, **kwargs)

    with nn.intercept_methods(record_module):
        boxed = interface.compute_param_shapes(model, batch_formats.get_smallest_batch_shapes(model.model_type))
    shapes = traverse_util.flatten_dict(nn.unbox(boxed), sep='/')
    return modules, {path: leaf.shape for path, leaf in shapes.items()}


class TracedModules:
    """The modules of a model, keyed by paths such as `encoder/layer/self_attention`.

    All layers of a stack share a path, because the same layers can be grouped into different runs.
    """

    def __init__(self, model: Model):
        self._modules: dict[str, dict[int, nn.Module]] = {}
        modules, shapes = record_modules(model)
        layers = LayerIndices(shapes)
        for path, module in modules.items():
            name, indices = layers.locate(path)
            self._modules.setdefault(name, {}).update(dict.fromkeys(indices or [0], module))

    def require_condition(self, holds: bool, difference: str) -> None:
        """Raises UnsupportedModelError with the reason `difference` unless `holds` is true."""
        if not holds:
            raise UnsupportedModelError(difference)

    def __contains__(self, path: str) -> bool:
        return path in self._modules

    def find_modules(self, *paths: str) -> list[Any]:
        """Returns the modules of all layers at the first path that exists.

        Raises UnsupportedModelError if no path exists.
        """
        modules = next((self._modules[path] for path in paths if path in self._modules), {})
        self.require_condition(bool(modules), f'it has no {" or ".join(paths)}')
        return [modules[index] for index in sorted(modules)]

    def find_module(self, *paths: str) -> Any:
        """Returns the first module at the first path that exists. Raises UnsupportedModelError if no path exists."""
        return self.find_modules(*paths)[0]

    def count_layers(self, stack: str) -> int:
        """Returns the number of layers of a stack ('encoder' or 'decoder')."""
        return len(self._modules[f'{stack}/layer'])

    def require_same_modules(self, expected: Model) -> None:
        """Raises UnsupportedModelError for the first module or setting that differs from those of `expected`."""
        ours, theirs = self._modules, TracedModules(expected)._modules
        for path, modules in ours.items():
            for layer, module in modules.items():
                other = theirs.get(path, {}).get(layer)
                self.require_condition(other is not None, f'it has a {type(module).__name__} as {path}')
                settings, others = read_module_settings(module), read_module_settings(other)
                for name in _find_differing_settings(settings, others):
                    values = f'{settings[name]!r}, not {others[name]!r}'
                    self.require_condition(False, f'{name} of {path or "the model"} is {values}')
        for path, modules in theirs.items():
            self.require_condition(modules.keys() <= ours.get(path, {}).keys(), f'it has no {path}')


class CustomName(str):
    """The qualified name, including the module, of a class or function outside of `remixer_t5x.models`."""

    __slots__ = ()


def _get_name(code: Any) -> str:
    is_ours = code.__module__.startswith('remixer_t5x.models.')
    return code.__name__ if is_ours else CustomName(f'{code.__module__}.{code.__name__}')


def read_module_settings(module: nn.Module) -> dict[str, Any]:
    """Returns the class of a module, and the plain values and function names of fields that determine its output."""
    settings: dict[str, Any] = {'class': _get_name(type(module))}
    for field in dataclasses.fields(module):
        name, value = field.name, getattr(module, field.name)
        # Functions from gin files are wrapped in `functools.partial`.
        function = getattr(value, 'func', value)
        value = _get_name(function) if inspect.isfunction(function) else value
        # All module fields of type `Rate` are dropout rates.
        is_training_field = name in TRAINING_FIELDS or field.type == ranges.Rate
        if not is_training_field and isinstance(value, bool | int | float | str | None):
            settings[name] = value
    if settings.get('num_kv_heads', 0) is None:
        settings['num_kv_heads'] = settings['num_heads']
    return settings


def _find_differing_settings(settings: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    def settings_are_equal(first: Any, second: Any) -> bool:
        if isinstance(first, float) and isinstance(second, float):
            return math.isclose(first, second, rel_tol=1e-6)
        return first == second

    # If a field is a module in one model and None in the other, `require_same_modules` reports the path of the module.
    return [name for name in settings if name in expected and not settings_are_equal(settings[name], expected[name])]
