"""Quantizes weights to 8-bit integers: symmetric, one scale for each output channel; activations stay unquantised.

    W[..., i, o] ~ q[..., i, o] s[..., o]      s = max over i of |W[..., i, o]| / 127

Hidden matrices, the token embedding and the output projection are quantised, which is nearly all of a model. Kernels
have a scale for each column of each layer and group, embeddings for each row, so that a rare word does not share a
scale with frequent ones. Norms, biases, heads and weights along positions or distances stay float32. A program expands
the weights when it is called, so storage, and memory between calls, shrink to a quarter.
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
LARGEST = 127
# Suffix of a quantised array's name, for its scales.
SCALE = '.scale'
# Smaller arrays stay float32.
_SMALLEST = 1024


def flatten_params(params: Params) -> dict[str, np.ndarray]:
    """The parameters by name, unquantised."""
    arrays = traverse_util.flatten_dict(params, sep='/')
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def quantize(model: interface.Model, weights: Weights) -> dict[str, np.ndarray]:
    """int8 arrays with their float32 scales, and the float32 arrays that are not quantised.

    Args:
        weights: all parameters of the model, from `flatten_params`.
    """
    boxes = interface.param_shapes(model, batch_formats.smallest_shapes(model.model_type))
    logical_axes = traverse_util.flatten_dict(nn.get_partition_spec(boxes), sep='/')
    arrays: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        axis = _scaled_axis(tuple(logical_axes[name]))
        if axis is None or array.size < _SMALLEST:
            arrays[name] = array
            continue
        scale = np.abs(array).max(axis=axis, keepdims=True) / LARGEST
        # The scale of a channel of zeros does not matter.
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        arrays[name] = np.clip(np.rint(array / scale), -LARGEST, LARGEST).astype(np.int8)
        arrays[name + SCALE] = scale
    return arrays


def _scaled_axis(names: tuple[str | None, ...]) -> int | None:
    """The axis along which values share a scale; None for a parameter that is not quantised."""
    if names == (axes.VOCAB, axes.EMBED):
        return -1
    return -2 if names == (axes.EMBED, axes.VOCAB) or axes.is_hidden_matrix(names) else None


def dequantize(weights: Weights) -> Params:
    """Returns weights, quantized or not, as nested float32 parameters."""
    params = {
        name: jnp.asarray(array, jnp.float32) * weights[name + SCALE] if name + SCALE in weights else array
        for name, array in weights.items()
        if not name.endswith(SCALE)
    }
    return traverse_util.unflatten_dict(params, sep='/')


def round_params(model: interface.Model, params: Params) -> Params:
    """The float32 parameters that a quantised model computes with."""
    return jax.device_get(dequantize(quantize(model, flatten_params(params))))


def rounded_in_place(model: interface.Model, params: Params) -> Params:
    """`round_params` for arrays on devices, with the same shardings."""
    values = round_params(model, jax.device_get(params))
    return jax.tree.map(lambda value, array: jax.device_put(value, array.sharding), values, params)
