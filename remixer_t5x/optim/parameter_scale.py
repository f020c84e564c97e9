"""Multiplies the update of a parameter by the parameter's size, as Adafactor with relative steps does.

The size of a parameter is its root mean square, but at least a minimum, so that a parameter at zero can leave it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from remixer_t5x import axes
from remixer_t5x.optim.per_layer import LAYERS_AXIS, which_are_stacked

_NO_FEATURES = {axes.POSITIONS_OUT, axes.POSITIONS_IN, axes.RELPOS_BUCKETS, axes.OUTPUTS, None}


def near_zero(logical_axes: Any) -> Any:
    """Tree of bool: whether a parameter may start near zero although its natural size is not small.

    These have no axis of features, hidden units, heads or words: scalars (Remixer's alpha, ReZero's scales), matrices
    between positions (Remixer's H, gMLP's free W), one number for each distance (gMLP's Toeplitz W), and vectors whose
    axis has no name (Remixer's vector alpha), biases of a head's outputs. T5 has no such parameter. The second matrix
    of an adapter (LoRA) starts at zero too.
    """

    def may_start_near_zero(spec: PartitionSpec) -> bool:
        names = {name for name in spec if name != LAYERS_AXIS}
        return names <= _NO_FEATURES or axes.LORA_RANK in spec[-2:-1]

    return jax.tree.map(may_start_near_zero, logical_axes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


def scale_by_parameter_rms(logical_axes: Any, min_rms: float, min_rms_near_zero: float) -> optax.GradientTransformation:
    """Multiplies the update of each layer's parameter by max(RMS of that parameter, a minimum).

    Args:
        logical_axes: tree of PartitionSpec of logical axis names.
        min_rms: the minimum of most parameters.
        min_rms_near_zero: the minimum of the parameters that `near_zero` names.
    """
    stacked, starts_near_zero = which_are_stacked(logical_axes), near_zero(logical_axes)

    def scale(is_stacked: bool, is_near_zero: bool, update: jax.Array, param: jax.Array) -> jax.Array:
        own = tuple(range(1 if is_stacked else 0, param.ndim))
        rms = jnp.sqrt(jnp.mean(jnp.square(param), axis=own, keepdims=True))
        return update * jnp.maximum(rms, min_rms_near_zero if is_near_zero else min_rms)

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        return jax.tree.map(scale, stacked, starts_near_zero, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
