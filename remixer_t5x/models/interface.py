"""What training and evaluation need of a model, whatever its frame; and what commands need in addition.

A frame is what a model looks like from outside, an encoder-decoder or a decoder alone; `data.frames` says what the
batches of each hold.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
from flax import linen as nn

from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture import stack
from remixer_t5x.models.layers import self_check

Params = Any
Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


class Model(Protocol):
    """A module and its loss, without parameters, so that every method is a pure function of them."""

    @property
    def frame(self) -> str:
        """The name of its frame, which decides what a batch holds."""

    @property
    def vocab_size(self) -> int:
        """The number of ids that it can read."""

    @property
    def module(self) -> nn.Module:
        """The module that has the parameters."""

    def init(self, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """Random parameters, float32, each boxed with its logical axes, for arrays of a batch of these shapes."""

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, Sums]:
        """A sum over what is predicted, and float32 sums to report, among them `weights`, by which a mean divides.
        Without a key nothing is dropped.
        """


def param_shapes(model: Model, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
    """What `model.init` returns, with a `jax.ShapeDtypeStruct` for each array. No array is computed."""
    # Shapes do not depend on kernels, so none is checked for the lengths of this call.
    with stack.traced_once(), self_check.recording():
        return jax.eval_shape(lambda key: model.init(key, batch_shapes), jax.random.key(0))


# What some models can do in addition, by the name of the method: in words, and the frames whose models have it.
ABILITIES = {
    'generate': ('generates text', ('encoder_decoder', 'decoder_only')),
    'score': ('scores a text given another', ('encoder_decoder', 'decoder_only')),
    'score_choices': ('ranks choices', ('encoder_decoder', 'decoder_only')),
    'encode': ('encodes text', ('encoder_decoder', 'encoder_only', 'classifier')),
    'classify': ('gives a text a label or a number', ('classifier',)),
}


def require(model: Model, ability: str, reader: str) -> None:
    """Raises UserError where the model has no method `ability`, which `reader` (a command, a setting) needs."""
    if callable(getattr(model, ability, None)):
        return
    words, frames = ABILITIES[ability]
    raise UserError(
        f'{reader} needs a model that {words}, and FRAME = {model.frame!r} has none; '
        f'use one with the frame {" or ".join(frames)}'
    )


def require_frame(model: Model, frame: str, reader: str) -> None:
    """Raises UserError where the model has another frame than `reader` (a command, a flag) is for."""
    if model.frame != frame:
        raise UserError(
            f'{reader} is for a model of the frame {frame}, and FRAME is {model.frame!r}; give such a model'
        )
