"""What an exported model computes: functions of weights and token ids, with any number of rows."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.data import frames
from remixer_t5x.errors import UserError
from remixer_t5x.extras.export import int8
from remixer_t5x.models import interface
from remixer_t5x.models.decoding import Decoder

# In the order in which they are written.
NAMES = ('generate', 'score', 'encode', 'classify')
Outputs = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Function:
    """One function `(weights, *inputs) -> outputs`.

    Attributes:
        name: one of NAMES.
        call: weights are arrays by name, as `int8.quantized` returns them or as they are; inputs are int32 arrays in
            the order of `inputs`; outputs are arrays by name.
        inputs: the name of each input and its shape behind the rows.
    """

    name: str
    call: Callable[..., Outputs]
    inputs: Mapping[str, tuple[int, ...]]


def possible(model: Any) -> list[str]:
    """The functions that the model has."""
    return [name for name in NAMES if callable(getattr(model, name, None))]


def make(model: Any, names: Sequence[str], lengths: Mapping[str, int], decoder: Decoder, eos_id: int) -> list[Function]:
    """The functions of these names.

    Args:
        model: a model.
        names: some of NAMES.
        lengths: tokens of `inputs` and `targets`, to which ids are padded with 0.
        decoder: the decoder of `generate`.
        eos_id: the token that ends a sequence.

    Raises UserError if the model lacks one.
    """
    for name in names:
        if name not in NAMES:
            raise UserError(f'--functions names {name!r}; it takes {", ".join(possible(model))}')
        interface.require(model, name, f'export --functions={name}')
    makers = {'generate': _generate, 'score': _score, 'encode': _encode, 'classify': _classify}
    inputs, targets = {'inputs': (lengths['inputs'],)}, {'targets': (lengths['targets'],)}
    made = []
    for name in names:
        call = makers[name](model, lengths, decoder, eos_id)
        given = {**inputs, **(targets if name == 'score' else {}), **({'seed': ()} if name == 'generate' else {})}
        made.append(Function(name, call, given))
    return made


def _generate(model: Any, lengths: Mapping[str, int], decoder: Decoder, eos_id: int) -> Callable[..., Outputs]:
    place, length = frames.input_array(model.frame), lengths['targets']

    def call(weights: int8.Weights, inputs: jax.Array, seed: jax.Array) -> Outputs:
        # One seed for each row, so that an answer does not depend on the other rows.
        keys = jax.vmap(jax.random.key)(seed)
        found = model.generate(int8.expanded(weights), {place: inputs}, length, eos_id, decoder, keys)
        return {'tokens': found.tokens, 'scores': found.scores}

    return call


def _score(model: Any, *_: Any) -> Callable[..., Outputs]:
    place = frames.input_array(model.frame)

    def call(weights: int8.Weights, inputs: jax.Array, targets: jax.Array) -> Outputs:
        decoder = {
            'decoder_input_tokens': jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1],
            'decoder_target_tokens': targets,
            'decoder_loss_weights': (targets > 0).astype(jnp.int32),
        }
        return {'scores': model.score(int8.expanded(weights), {place: inputs, **decoder})}

    return call


def _encode(model: Any, *_: Any) -> Callable[..., Outputs]:
    def call(weights: int8.Weights, inputs: jax.Array) -> Outputs:
        hidden = model.encode(int8.expanded(weights), inputs).astype(jnp.float32)
        mask = (inputs > 0).astype(jnp.float32)[..., None]
        mean = jnp.sum(hidden * mask, 1) / jnp.maximum(jnp.sum(mask, 1), 1)
        return {'hidden': hidden * mask, 'mean': mean}

    return call


def _classify(model: Any, *_: Any) -> Callable[..., Outputs]:
    return lambda weights, inputs: {'scores': model.classify(int8.expanded(weights), inputs)}
