"""Weights as 8-bit integers: symmetric, one scale for each output channel, activations as they were.

    W[..., i, o] ~ q[..., i, o] s[..., o]      s = max over i of |W[..., i, o]| / 127

What a matmul or a lookup reads is quantised, which is nearly all of a model: kernels by column (of each layer and
group), embeddings by row, so that a rare word does not share a scale with frequent ones. Norms, biases and matrices
along positions stay float32. A program expands the weights when it is called: what is stored, and kept in memory
between calls, is a quarter.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

Params = Any
Weights = Mapping[str, Any]
LARGEST = 127
# Behind the name of a quantised array, for its scales.
SCALE = '.scale'
# The axis that shares a scale, by the last part of a name.
_SHARED = {'kernel': -2, 'embedding': -1}
# Smaller arrays are not worth a second one.
_SMALLEST = 1024


def flat(params: Params) -> dict[str, np.ndarray]:
    """The parameters by name, as they are."""
    arrays = traverse_util.flatten_dict(params, sep='/')
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def quantized(weights: Weights) -> dict[str, np.ndarray]:
    """int8 arrays with their float32 scales, and what is not quantised as it is."""
    found: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        axis = _SHARED.get(name.rpartition('/')[2])
        if axis is None or array.ndim < 2 or array.size < _SMALLEST:
            found[name] = array
            continue
        scale = np.abs(array).max(axis=axis, keepdims=True) / LARGEST
        # A channel of zeros has any scale.
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        found[name] = np.clip(np.rint(array / scale), -LARGEST, LARGEST).astype(np.int8)
        found[name + SCALE] = scale
    return found


def expanded(weights: Weights) -> Params:
    """The nested float32 parameters of `quantized` or unquantised weights."""
    params = {
        name: jnp.asarray(array, jnp.float32) * weights[name + SCALE] if name + SCALE in weights else array
        for name, array in weights.items()
        if not name.endswith(SCALE)
    }
    return traverse_util.unflatten_dict(params, sep='/')


def rounded(params: Params) -> Params:
    """The float32 parameters that a quantised model computes with."""
    return jax.device_get(expanded(quantized(flat(params))))


def rounded_in_place(params: Params) -> Params:
    """The same for arrays on devices: the numbers that a quantised model computes with, where they were."""
    return jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), rounded(jax.device_get(params)), params)
