"""Records the modules of a model while Flax initializes it, so that all gin settings are resolved."""

import inspect
import math
import re
from typing import Any

from flax import linen as nn
from flax import traverse_util

from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from remixer_t5x.models.architecture.layer import Block
from remixer_t5x.models.interface import Model

Path = tuple[str, ...]
# Fields that do not change what a module computes from its parameters, except for rounding.
TRAINING_FIELDS = (
    *('attention', 'axes', 'dropout_rate', 'dtype', 'kernel_init', 'mixing_dropout_rate', 'name', 'one_hot'),
    *('remat_policy', 'stddev', 'unroll'),
)


class UnsupportedModelError(UserError):
    """Raised if another format cannot represent a model; `reason` describes the first difference."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f'{reason}; --to_safetensors=FILE writes the parameters of any model')


def record_modules(model: Model) -> tuple[dict[Path, nn.Module], dict[Path, tuple[int, ...]]]:
    """Returns the modules of a model (except for dropout) and its parameter shapes, both keyed by path."""
    modules: dict[Path, nn.Module] = {}

    def record_module(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if not isinstance(context.module, nn.Dropout):
            modules.setdefault(context.module.path, context.module)
        return call(*args, **kwargs)

    with nn.intercept_methods(record_module):
        boxed = interface.compute_param_shapes(model, batch_formats.get_smallest_batch_shapes(model.model_type))
    return modules, {path: leaf.shape for path, leaf in traverse_util.flatten_dict(nn.unbox(boxed)).items()}


class TracedModules:
    """The modules of a model, keyed by paths such as `encoder/layer/self_attention`.

    All layers of a stack share a path, because the same layers can be grouped into different runs.
    """

    def __init__(self, model: Model):
        self._modules: dict[str, list[nn.Module]] = {}
        for path, module in record_modules(model)[0].items():
            if not isinstance(module, Block) and not re.fullmatch(r'run_\d+', path[-1] if path else ''):
                name = re.sub(r'/run_\d+/layer(/layer_\d+)?', '/layer', '/'.join(path))
                self._modules.setdefault(name, []).append(module)

    def require_condition(self, holds: bool, difference: str) -> None:
        """Raises UnsupportedModelError with the reason `difference` unless `holds` is true."""
        if not holds:
            raise UnsupportedModelError(difference)

    def __contains__(self, path: str) -> bool:
        return path in self._modules

    def find_modules(self, *paths: str) -> list[Any]:
        """Returns the modules at the first path that exists. Raises UnsupportedModelError if no path exists."""
        modules = next((self._modules[path] for path in paths if path in self._modules), None)
        if modules is None:
            layer = paths[0].rpartition('/')[0]
            children = [each for name, each in self._modules.items() if name.rpartition('/')[0] == layer]
            names = ', '.join(type(each[0]).__name__ for each in children)
            self.require_condition(
                False, f'it has no {" or ".join(paths)}; {layer or "it"} consists of {names or "nothing"}'
            )
        return modules or []

    def find_module(self, *paths: str) -> Any:
        """Returns the first module at the first path that exists. Raises UnsupportedModelError if no path exists."""
        return self.find_modules(*paths)[0]

    def require_same_modules(self, expected: Model) -> None:
        """Raises UnsupportedModelError for the first module or setting that differs from those of `expected`."""
        ours, theirs = self._modules, TracedModules(expected)._modules
        for path, modules in ours.items():
            self.require_condition(path in theirs, f'it has a {type(modules[0]).__name__} as {path}')
            others = [_read_module_settings(module) for module in theirs[path]]
            for settings in map(_read_module_settings, modules):
                for name in min((_find_differing_settings(settings, each) for each in others), key=len):
                    values = f'{settings[name]!r}, not {others[0][name]!r}'
                    self.require_condition(False, f'{name} of {path or "the model"} is {values}')
        for path in theirs:
            self.require_condition(path in ours, f'it has no {path}')


def _read_module_settings(module: nn.Module) -> dict[str, Any]:
    settings: dict[str, Any] = {'class': type(module).__name__}
    for name in type(module).__dataclass_fields__:
        value = getattr(module, name)
        value = value.__name__ if inspect.isfunction(value) else value
        if name not in TRAINING_FIELDS and isinstance(value, bool | int | float | str | None):
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
