"""Parameters and FLOPs of a model, module by module, from shapes alone: no device, no memory, no compilation.

Conventions: FLOPs count the matrix products of one forward pass for one example (see `costs.flops`); a training step
costs three forward passes, one forward and two for the gradients of inputs and weights (Kaplan et al. 2020), without
recomputation under remat.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from remixer_t5x.costs import flops
from remixer_t5x.costs.flops import Path
from remixer_t5x.data import frames
from remixer_t5x.models import interface
from remixer_t5x.models.interface import Model

TRAINING_FORWARD_PASSES = 3


@dataclasses.dataclass(frozen=True)
class Counts:
    """Parameters and FLOPs of a model.

    Attributes:
        parameters: number of scalars by the path of their array; layers of a scanned run are counted together.
        forward_flops: per example, by module path; `()` is everything outside of modules (the loss).
        tokens: number of tokens of one example that the model reads.
    """

    parameters: Mapping[Path, int]
    forward_flops: Mapping[Path, float]
    tokens: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_forward_flops(self) -> float:
        return sum(self.forward_flops.values())

    @property
    def training_flops(self) -> float:
        """FLOPs of one training step per example."""
        return TRAINING_FORWARD_PASSES * self.total_forward_flops


def count(model: Model, feature_lengths: Mapping[str, int] | None) -> Counts:
    """Counts a model at given lengths.

    Args:
        model: any model; it is initialised and its loss is traced.
        feature_lengths: tokens of each feature, `inputs` and `targets`; None takes usual ones of the model's frame.
    """
    return count_row(model, frames.abstract_batch(model.frame, feature_lengths))


def count_row(model: Model, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Counts:
    """Counts a model for one row of a batch, which is taken to be one example."""
    row = {
        name: jax.ShapeDtypeStruct((1, *array.shape[1:]), array.dtype)
        for name, array in batch.items()
        if not name.endswith(('_segment_ids', '_positions'))
    }
    shapes = {name: array.shape for name, array in row.items()}
    params = nn.unbox(interface.param_shapes(model, shapes))
    return Counts(
        parameters=parameter_counts(params),
        forward_flops=flops.per_module(model.loss, params, row),
        tokens=sum(frames.token_lengths(shapes)),
    )


def parameter_counts(params: Any) -> dict[Path, int]:
    """The number of scalars of every array of an unboxed parameter tree (arrays or shapes), by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_names(path): math.prod(leaf.shape) for path, leaf in leaves}


def _names(path: tuple[Any, ...]) -> Path:
    names = tuple(str(getattr(key, 'key', getattr(key, 'name', key))) for key in path)
    return names[1:] if names[:1] == ('params',) else names
