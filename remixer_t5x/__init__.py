"""Pretrains, finetunes, evaluates and runs T5-style encoder-decoders with any token mixer.

The names in `__all__` are the public Python API (docs/guide/python.md). Each name is imported when it is first used, so
that `import remixer_t5x` loads neither JAX nor TensorFlow.
"""

import importlib

__version__ = '0.1.0'

# Maps each public name to a module and a name in that module, or to a module and None for the module itself.
_DEFINITIONS: dict[str, tuple[str, str | None]] = {
    'build_model': ('api.model_building', 'build_model'),
    'load': ('api.saved_models', 'load'),
    'TrainedModel': ('api.trained_model', 'TrainedModel'),
    'make_batch': ('api.token_batches', 'make_batch'),
    'Greedy': ('models.decoding', 'Greedy'),
    'Sampling': ('models.sampling', 'Sampling'),
    'BeamSearch': ('models.beam_search', 'BeamSearch'),
    'Partitioner': ('devices.partition', 'Partitioner'),
    'adafactor': ('optim.optimizer', 'adafactor'),
    'adamw_rms': ('optim.optimizer', 'adamw_rms'),
    'TrainState': ('optim.train_state', 'TrainState'),
    'plan_train_state': ('optim.train_state', 'plan_train_state'),
    'make_train_step': ('optim.train_step', 'make_train_step'),
    'jit_train_step': ('optim.train_step', 'jit_train_step'),
    'UserError': ('errors', 'UserError'),
    'testing': ('testing', None),
}
__all__ = ['__version__', *_DEFINITIONS]  # noqa: PLE0604 (every entry is a str)


def __getattr__(name: str) -> object:
    if name not in _DEFINITIONS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module, attribute = _DEFINITIONS[name]
    value: object = importlib.import_module(f'{__name__}.{module}')
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


# Define TYPE_CHECKING here, because importing it from `typing` would take longer than the rest of this file.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from remixer_t5x import testing as testing
    from remixer_t5x.api.model_building import build_model as build_model
    from remixer_t5x.api.saved_models import load as load
    from remixer_t5x.api.token_batches import make_batch as make_batch
    from remixer_t5x.api.trained_model import TrainedModel as TrainedModel
    from remixer_t5x.devices.partition import Partitioner as Partitioner
    from remixer_t5x.errors import UserError as UserError
    from remixer_t5x.models.beam_search import BeamSearch as BeamSearch
    from remixer_t5x.models.decoding import Greedy as Greedy
    from remixer_t5x.models.sampling import Sampling as Sampling
    from remixer_t5x.optim.optimizer import adafactor as adafactor
    from remixer_t5x.optim.optimizer import adamw_rms as adamw_rms
    from remixer_t5x.optim.train_state import TrainState as TrainState
    from remixer_t5x.optim.train_state import plan_train_state as plan_train_state
    from remixer_t5x.optim.train_step import jit_train_step as jit_train_step
    from remixer_t5x.optim.train_step import make_train_step as make_train_step
