"""Quantizes weights symmetrically to 8-bit integers with one scale per output channel; activations are not quantized.

    W[..., i, o] ~ q[..., i, o] s[..., o]      s = max over i of |W[..., i, o]| / 127

The hidden matrices, token embedding and output projection, which contain nearly all parameters, are quantized.
Kernels have one scale per column of each layer and group. Embeddings have one scale per row, so that rare words do not
share a scale with frequent words. Norms, biases, heads and weights over positions or distances stay in float32. The
exported program dequantizes the weights in each call, so storage and memory between calls shrink to a quarter.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util

from remixer_t5x import axes
from remixer_t5x.data import batch_formats
from remixer_t5x.models import interface

Params = Any
Weights = Mapping[str, Any]
MAX_INT8 = 127
# The scales of a quantized array are stored under its name with this suffix.
SCALE_SUFFIX = '.scale'
# Arrays with fewer elements are not quantized.
_MIN_QUANTIZED_SIZE = 1024


def flatten_params(params: Params) -> dict[str, np.ndarray]:
    """Flattens unquantized parameters to a dict from names to arrays."""
    arrays = traverse_util.flatten_dict(params, sep='/')
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def quantize_weights(model: interface.Model, weights: Weights) -> dict[str, np.ndarray]:
    """Quantizes matrices to int8 arrays with float32 scales, and returns the other arrays in float32.

    Args:
        weights: all parameters of the model, from `flatten_params`.
    """
    boxes = interface.param_shapes(model, batch_formats.smallest_shapes(model.model_type))
    logical_axes = traverse_util.flatten_dict(nn.get_partition_spec(boxes), sep='/')
    arrays: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        axis = _shared_scale_axis(tuple(logical_axes[name]))
        if axis is None or array.size < _MIN_QUANTIZED_SIZE:
            arrays[name] = array
            continue
        scale = np.abs(array).max(axis=axis, keepdims=True) / MAX_INT8
        # A channel of zeros may have any scale except 0.
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        arrays[name] = np.clip(np.rint(array / scale), -MAX_INT8, MAX_INT8).astype(np.int8)
        arrays[name + SCALE_SUFFIX] = scale
    return arrays


def _shared_scale_axis(names: tuple[str | None, ...]) -> int | None:
    """Returns the axis along which values share a scale, or None for a parameter that is not quantized."""
    if names == (axes.VOCAB, axes.EMBED):
        return -1
    return -2 if names == (axes.EMBED, axes.VOCAB) or axes.is_hidden_matrix(names) else None


def dequantize_weights(weights: Weights) -> Params:
    """Converts weights, which may be quantized, to nested float32 parameters."""
    params = {
        name: jnp.asarray(array, jnp.float32) * weights[name + SCALE_SUFFIX]
        if name + SCALE_SUFFIX in weights
        else array
        for name, array in weights.items()
        if not name.endswith(SCALE_SUFFIX)
    }
    return traverse_util.unflatten_dict(params, sep='/')


def round_params(model: interface.Model, params: Params) -> Params:
    """Rounds parameters to the values of the quantized model, in float32."""
    return jax.device_get(dequantize_weights(quantize_weights(model, flatten_params(params))))


def round_on_devices(model: interface.Model, params: Params) -> Params:
    """Rounds device arrays as in `round_params` without changing their shardings."""
    values = round_params(model, jax.device_get(params))
    return jax.tree.map(lambda value, array: jax.device_put(value, array.sharding), values, params)
