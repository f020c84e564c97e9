"""Builds the functions of an exported model, and converts them to StableHLO programs for any batch size.

A StableHLO program (`jax.export`) runs on CPUs, GPUs and TPUs, without this package. The weights are arguments of the
program, because all functions of a model share them. JAX guarantees that a program can be loaded by all JAX releases
of at least the next six months.

Weights can be quantized symmetrically to 8-bit integers with one scale per output channel; activations are not
quantized.

    W[..., i, o] ~ q[..., i, o] s[..., o]      s = max over i of |W[..., i, o]| / 127

The hidden matrices, token embedding and output projection, which contain nearly all parameters, are quantized.
Kernels have one scale per column of each layer and group. Embeddings have one scale per row, so that rare words do not
share a scale with frequent words. Norms, biases, heads and weights indexed by position or distance stay in float32.
The exported program dequantizes the weights in each call, so storage and memory between calls shrink to a quarter.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import traverse_util
from jax import export

from remixer_t5x import axes
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from remixer_t5x.models.decoding import Decoder, StopStrings

Params = Any
Weights = Mapping[str, Any]
MAX_INT8 = 127
# The scales of a quantized array are stored under its name with this suffix.
SCALE_SUFFIX = '.scale'
# Arrays with fewer elements are not quantized.
_MIN_QUANTIZED_SIZE = 1024
# The functions that can be exported, in the default order. standalone.py has a method for each of them.
FUNCTION_NAMES = ('generate', 'score', 'encode', 'classify')
PLATFORMS = ('cpu', 'cuda', 'tpu')
Outputs = dict[str, jax.Array]


def flatten_params(params: Params) -> dict[str, np.ndarray]:
    """Flattens unquantized parameters to a dict from names to arrays."""
    arrays = traverse_util.flatten_dict(params, sep='/')
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}


def quantize_weights(model: interface.Model, weights: Weights) -> dict[str, np.ndarray]:
    """Quantizes matrices to int8 arrays with float32 scales, and returns the other arrays in float32.

    Args:
        weights: all parameters of the model, from `flatten_params`.
    """
    boxes = interface.compute_param_shapes(model, batch_formats.get_smallest_batch_shapes(model.model_type))
    logical_axes = traverse_util.flatten_dict(nn.get_partition_spec(boxes), sep='/')
    arrays: dict[str, np.ndarray] = {}
    for name, array in weights.items():
        axis = _find_scale_axis(tuple(logical_axes[name]))
        if axis is None or array.size < _MIN_QUANTIZED_SIZE:
            arrays[name] = array
            continue
        scale = np.abs(array).max(axis=axis, keepdims=True) / MAX_INT8
        # A channel of zeros may have any scale except 0.
        scale = np.where(scale > 0, scale, 1).astype(np.float32)
        arrays[name] = np.clip(np.rint(array / scale), -MAX_INT8, MAX_INT8).astype(np.int8)
        arrays[name + SCALE_SUFFIX] = scale
    return arrays


def _find_scale_axis(names: tuple[str | None, ...]) -> int | None:
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


def round_params_on_devices(model: interface.Model, params: Params) -> Params:
    """Rounds device arrays to the values of the quantized model, in float32, without changing their shardings."""
    values = round_params(model, jax.device_get(params))
    return jax.tree.map(lambda value, array: jax.device_put(value, array.sharding), values, params)


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """A function `(weights, *inputs) -> outputs` to export.

    Attributes:
        name: one of FUNCTION_NAMES.
        call: the function. `weights` maps names to arrays, which may be quantized by `quantize_weights`. The
            inputs are int32 arrays in the order of `inputs`, and the outputs map names to arrays.
        inputs: maps the name of each input to its shape without the batch dimension.
    """

    name: str
    call: Callable[..., Outputs]
    inputs: Mapping[str, tuple[int, ...]]

    def to_stablehlo(self, weights: Mapping[str, np.ndarray]) -> export.Exported:
        """Exports the function for weights with the shapes and dtypes of `weights`."""
        (rows,) = export.symbolic_shape('rows')
        shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()}
        inputs = [jax.ShapeDtypeStruct((rows, *shape), jnp.int32) for shape in self.inputs.values()]
        return export.export(jax.jit(self.call), platforms=PLATFORMS)(shapes, *inputs)


def list_supported_functions(model: Any) -> list[str]:
    """Returns the names of the functions that the model supports."""
    return [name for name in FUNCTION_NAMES if callable(getattr(model, name, None))]


def build_functions(
    model: Any,
    names: Sequence[str],
    lengths: Mapping[str, int],
    decoder: Decoder,
    eos_id: int,
    stop_strings: StopStrings | None = None,
) -> list[ExportedFunction]:
    """Builds the exported functions with the given names.

    Args:
        lengths: maps 'inputs' and 'targets' to the lengths to which their ids are padded with 0.
        decoder: the decoder of `generate`.
        eos_id: id of the token that ends a sequence.
        stop_strings: texts that end a sequence, in addition to `eos_id`.

    Raises UserError for a function that the model does not support.
    """
    for name in names:
        if name not in FUNCTION_NAMES:
            raise UserError(
                f'--functions must be names from {", ".join(list_supported_functions(model))}, got {name!r}'
            )
        interface.require_method(model, name, f'export --functions={name}')
    array = batch_formats.get_input_array_name(model.model_type)

    def generate(weights: Weights, inputs: jax.Array, seed: jax.Array) -> Outputs:
        # With one seed per row, an answer does not depend on the other rows of the batch.
        keys = jax.vmap(jax.random.key)(seed)
        params = dequantize_weights(weights)
        answers = model.generate(params, {array: inputs}, lengths['targets'], eos_id, decoder, keys, stop_strings)
        return {'tokens': answers.tokens, 'scores': answers.scores}

    def score(weights: Weights, inputs: jax.Array, targets: jax.Array) -> Outputs:
        batch = {
            array: inputs,
            'decoder_input_tokens': jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            'decoder_target_tokens': targets,
        }
        return {'scores': model.score(dequantize_weights(weights), batch)}

    def encode(weights: Weights, inputs: jax.Array) -> Outputs:
        params = dequantize_weights(weights)
        encoded = model.encode(params, inputs)
        hidden, mask = encoded.astype(jnp.float32), (inputs > 0).astype(jnp.float32)[..., None]
        mean = sentence = jnp.sum(hidden * mask, 1) / jnp.maximum(jnp.sum(mask, 1), 1)
        if model.model_type == batch_formats.EMBEDDING:
            sentence = model.pool(encoded, inputs)
        elif hasattr(model, 'project_sentence'):
            sentence = model.project_sentence(params, mean)
        return {'hidden': hidden * mask, 'mean': mean, 'sentence': sentence.astype(jnp.float32)}

    def classify(weights: Weights, inputs: jax.Array) -> Outputs:
        return {'scores': model.classify(dequantize_weights(weights), inputs)}

    inputs: dict[str, tuple[int, ...]] = {'inputs': (lengths['inputs'],)}
    functions = {
        'generate': ExportedFunction('generate', generate, {**inputs, 'seed': ()}),
        'score': ExportedFunction('score', score, {**inputs, 'targets': (lengths['targets'],)}),
        'encode': ExportedFunction('encode', encode, inputs),
        'classify': ExportedFunction('classify', classify, inputs),
    }
    return [functions[name] for name in names]
