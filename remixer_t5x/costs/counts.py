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
import jax.numpy as jnp

from remixer_t5x.costs import flops
from remixer_t5x.costs.flops import Path

TRAINING_FORWARD_PASSES = 3


@dataclasses.dataclass(frozen=True)
class Counts:
    """Parameters and FLOPs of a model.

    Attributes:
        parameters: number of scalars by the path of their array; layers of a scanned run are counted together.
        forward_flops: per example, by module path; `()` is everything outside of modules (the loss).
        tokens: number of input and target tokens of one example.
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


def count(model: Any, feature_lengths: Mapping[str, int]) -> Counts:
    """Counts a model at given lengths.

    Args:
        model: a `Seq2Seq`, or any object with its `init` and `loss`.
        feature_lengths: `inputs` and `targets` in tokens.
    """
    batch = abstract_batch(feature_lengths)
    shapes = {name: array.shape for name, array in batch.items()}
    params = nn.unbox(jax.eval_shape(lambda key: model.init(key, shapes), jax.random.key(0)))
    return Counts(
        parameters=parameter_counts(params),
        forward_flops=flops.per_module(model.loss, params, batch),
        tokens=feature_lengths['inputs'] + feature_lengths['targets'],
    )


def abstract_batch(
    feature_lengths: Mapping[str, int], batch_size: int = 1, pack: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a batch, [batch, length] int32, under seqio's names; `pack` adds the features of packed rows."""

    def tokens(feature: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch_size, feature_lengths[feature]), jnp.int32)

    batch = {
        'encoder_input_tokens': tokens('inputs'),
        'decoder_input_tokens': tokens('targets'),
        'decoder_target_tokens': tokens('targets'),
        'decoder_loss_weights': tokens('targets'),
    }
    if pack:
        for side, feature in (('encoder', 'inputs'), ('decoder', 'targets')):
            batch |= {f'{side}_{what}': tokens(feature) for what in ('segment_ids', 'positions')}
    return batch


def parameter_counts(params: Any) -> dict[Path, int]:
    """The number of scalars of every array of an unboxed parameter tree (arrays or shapes), by path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_names(path): math.prod(leaf.shape) for path, leaf in leaves}


def _names(path: tuple[Any, ...]) -> Path:
    names = tuple(str(getattr(key, 'key', getattr(key, 'name', key))) for key in path)
    return names[1:] if names[:1] == ('params',) else names
