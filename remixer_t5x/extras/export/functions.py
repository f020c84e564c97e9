"""Builds the functions of an exported model, and converts them to StableHLO programs for any batch size.

A StableHLO program (`jax.export`) runs on CPUs, GPUs and TPUs, without this package. The weights are arguments of the
program, because all functions of a model share them. JAX guarantees that releases of at least the next six months can
load the program.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.extras.export import int8
from remixer_t5x.extras.export.int8 import Weights
from remixer_t5x.models import interface
from remixer_t5x.models.decoding import Decoder
from remixer_t5x.models.stop_strings import StopStrings

# The functions that can be exported, in the default order.
FUNCTION_NAMES = ('generate', 'score', 'encode', 'classify')
PLATFORMS = ('cpu', 'cuda', 'tpu')
Outputs = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """A function `(weights, *inputs) -> outputs` to export.

    Attributes:
        name: one of FUNCTION_NAMES.
        call: the function. `weights` maps names to arrays, which may be quantized by `int8.quantize_weights`. The
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


def supported_names(model: Any) -> list[str]:
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
            raise UserError(f'--functions must be names from {", ".join(supported_names(model))}, got {name!r}')
        interface.require_method(model, name, f'export --functions={name}')
    array = batch_formats.input_array_name(model.model_type)

    def generate(weights: Weights, inputs: jax.Array, seed: jax.Array) -> Outputs:
        # With one seed per row, an answer does not depend on the other rows of the batch.
        keys = jax.vmap(jax.random.key)(seed)
        params = int8.dequantize_weights(weights)
        answers = model.generate(params, {array: inputs}, lengths['targets'], eos_id, decoder, keys, stop_strings)
        return {'tokens': answers.tokens, 'scores': answers.scores}

    def score(weights: Weights, inputs: jax.Array, targets: jax.Array) -> Outputs:
        batch = {
            array: inputs,
            'decoder_input_tokens': jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            'decoder_target_tokens': targets,
            'decoder_loss_weights': (targets > 0).astype(jnp.int32),
        }
        return {'scores': model.score(int8.dequantize_weights(weights), batch)}

    def encode(weights: Weights, inputs: jax.Array) -> Outputs:
        hidden = model.encode(int8.dequantize_weights(weights), inputs).astype(jnp.float32)
        mask = (inputs > 0).astype(jnp.float32)[..., None]
        mean = jnp.sum(hidden * mask, 1) / jnp.maximum(jnp.sum(mask, 1), 1)
        return {'hidden': hidden * mask, 'mean': mean}

    def classify(weights: Weights, inputs: jax.Array) -> Outputs:
        return {'scores': model.classify(int8.dequantize_weights(weights), inputs)}

    inputs: dict[str, tuple[int, ...]] = {'inputs': (lengths['inputs'],)}
    functions = {
        'generate': ExportedFunction('generate', generate, {**inputs, 'seed': ()}),
        'score': ExportedFunction('score', score, {**inputs, 'targets': (lengths['targets'],)}),
        'encode': ExportedFunction('encode', encode, inputs),
        'classify': ExportedFunction('classify', classify, inputs),
    }
    return [functions[name] for name in names]
