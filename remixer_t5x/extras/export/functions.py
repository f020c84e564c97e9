"""The functions that an exported model computes, of weights and token ids with any number of rows, as StableHLO.

A StableHLO program (`jax.export`) runs on CPUs, GPUs and TPUs. It excludes the weights, which all functions of a model
share. JAX versions released in at least the next six months can read it (JAX's compatibility guarantee), without this
package.
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

# In the order in which they are written.
NAMES = ('generate', 'score', 'encode', 'classify')
PLATFORMS = ('cpu', 'cuda', 'tpu')
Outputs = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Function:
    """One function `(weights, *inputs) -> outputs`.

    Attributes:
        name: one of NAMES.
        call: weights are arrays by name, as `int8.quantize` returns them or unquantised; inputs are int32 arrays in
            the order of `inputs`; outputs are arrays by name.
        inputs: the name of each input and its shape without the rows.
    """

    name: str
    call: Callable[..., Outputs]
    inputs: Mapping[str, tuple[int, ...]]

    def exported(self, weights: Mapping[str, np.ndarray]) -> export.Exported:
        """The program for weights of these shapes."""
        (rows,) = export.symbolic_shape('rows')
        shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()}
        inputs = [jax.ShapeDtypeStruct((rows, *shape), jnp.int32) for shape in self.inputs.values()]
        return export.export(jax.jit(self.call), platforms=PLATFORMS)(shapes, *inputs)


def supported_names(model: Any) -> list[str]:
    """The functions that the model has."""
    return [name for name in NAMES if callable(getattr(model, name, None))]


def make_functions(
    model: Any,
    names: Sequence[str],
    lengths: Mapping[str, int],
    decoder: Decoder,
    eos_id: int,
    stop_strings: StopStrings | None = None,
) -> list[Function]:
    """The functions of these names.

    Args:
        model: a model.
        names: some of NAMES.
        lengths: tokens of `inputs` and `targets`, to which ids are padded with 0.
        decoder: the decoder of `generate`.
        eos_id: the token that ends a sequence.
        stop_strings: texts that end a sequence, in addition to `eos_id`.

    Raises UserError if the model lacks one.
    """
    for name in names:
        if name not in NAMES:
            raise UserError(f'--functions must be some of {", ".join(supported_names(model))}, got {name!r}')
        interface.require_method(model, name, f'export --functions={name}')
    array = batch_formats.input_array(model.model_type)

    def generate(weights: Weights, inputs: jax.Array, seed: jax.Array) -> Outputs:
        # One seed for each row, so that an answer does not depend on the other rows.
        keys = jax.vmap(jax.random.key)(seed)
        params = int8.dequantize(weights)
        answers = model.generate(params, {array: inputs}, lengths['targets'], eos_id, decoder, keys, stop_strings)
        return {'tokens': answers.tokens, 'scores': answers.scores}

    def score(weights: Weights, inputs: jax.Array, targets: jax.Array) -> Outputs:
        batch = {
            array: inputs,
            'decoder_input_tokens': jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            'decoder_target_tokens': targets,
            'decoder_loss_weights': (targets > 0).astype(jnp.int32),
        }
        return {'scores': model.score(int8.dequantize(weights), batch)}

    def encode(weights: Weights, inputs: jax.Array) -> Outputs:
        hidden = model.encode(int8.dequantize(weights), inputs).astype(jnp.float32)
        mask = (inputs > 0).astype(jnp.float32)[..., None]
        mean = jnp.sum(hidden * mask, 1) / jnp.maximum(jnp.sum(mask, 1), 1)
        return {'hidden': hidden * mask, 'mean': mean}

    def classify(weights: Weights, inputs: jax.Array) -> Outputs:
        return {'scores': model.classify(int8.dequantize(weights), inputs)}

    inputs: dict[str, tuple[int, ...]] = {'inputs': (lengths['inputs'],)}
    functions = {
        'generate': Function('generate', generate, {**inputs, 'seed': ()}),
        'score': Function('score', score, {**inputs, 'targets': (lengths['targets'],)}),
        'encode': Function('encode', encode, inputs),
        'classify': Function('classify', classify, inputs),
    }
    return [functions[name] for name in names]
