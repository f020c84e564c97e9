"""Weights as 8-bit integers: symmetric, one scale for each output channel, activations as they were.

    W[..., i, o] ~ q[..., i, o] s[..., o]      s = max over i of |W[..., i, o]| / 127

Hidden matrices, the token embedding and the output projection are quantised, which is nearly all of a model: kernels by
column of each layer and group, embeddings by row, so that a rare word does not share a scale with frequent ones. No
scale is shared by layers. Norms, biases, heads and weights along positions or distances stay float32. A program expands
the weights when it is called: what is stored, and kept in memory between calls, is a quarter.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from remixer_t5x import axes
from remixer_t5x.data import frames
from remixer_t5x.models import interface

Params = Any
Weights = Mapping[str, Any]
LARGEST = 127
# Behind the name of a quantised array, for its scales.
SCALE = '.scale'
# Smaller arrays are not worth a second one.
_SMALLEST = 1024


def flat(params: Params) -> dict[str, np.ndarray]:
    """The parameters by name, as they are."""
    arrays = traverse_util.flatten_dict(params, sep='/')
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def quantized(model: interface.Model, weights: Weights) -> dict[str, np.ndarray]:
    """int8 arrays with their float32 scales, and the float32 arrays that are not quantised; `weights` are all of the
    model's.
    """
    boxes = interface.param_shapes(model, frames.smallest_shapes(model.frame))
    logical_axes = traverse_util.flatten_dict(nn.get_partition_spec(boxes), sep='/')
    found: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        axis = _scaled_axis(tuple(logical_axes[name]))
        if axis is None or array.size < _SMALLEST:
            found[name] = array
            continue
        scale = np.abs(array).max(axis=axis, keepdims=True) / LARGEST
        # A channel of zeros has any scale.
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        found[name] = np.clip(np.rint(array / scale), -LARGEST, LARGEST).astype(np.int8)
        found[name + SCALE] = scale
    return found


def _scaled_axis(names: tuple[str | None, ...]) -> int | None:
    """The axis along which values share a scale; None for a parameter that is not quantised."""
    if names == (axes.VOCAB, axes.EMBED):
        return -1
    return -2 if names == (axes.EMBED, axes.VOCAB) or axes.is_hidden_matrix(names) else None


def expanded(weights: Weights) -> Params:
    """The nested float32 parameters of `quantized` or unquantised weights."""
    params = {
        name: jnp.asarray(array, jnp.float32) * weights[name + SCALE] if name + SCALE in weights else array
        for name, array in weights.items()
        if not name.endswith(SCALE)
    }
    return traverse_util.unflatten_dict(params, sep='/')


def rounded(model: interface.Model, params: Params) -> Params:
    """The float32 parameters that a quantised model computes with."""
    return jax.device_get(expanded(quantized(model, flat(params))))


def rounded_in_place(model: interface.Model, params: Params) -> Params:
    """The same for arrays on devices: the numbers that a quantised model computes with, where they were."""
    new = rounded(model, jax.device_get(params))
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), new, params)
