"""The base class of the four models, and what a command may ask of a model.

A model type is, for example, an encoder-decoder or a decoder alone. `data.batch_formats` lists the arrays in a batch
of each type.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.errors import UserError
from remixer_t5x.kernels import self_check
from remixer_t5x.models import losses
from remixer_t5x.models.architecture import stack

Params = Any
Batch = Mapping[str, jax.Array]
Sums = losses.Sums


@dataclasses.dataclass(frozen=True)
class Model:
    """A module and its loss. It has no parameters, so every method is a pure function of them.

    A batch is a mapping of arrays with the names of seqio's feature converters; each subclass lists its own.

    Attributes:
        module: the Flax module, which defines the parameters.
        config: the gin text that describes the model, for `TrainedModel.save`; empty if it was made by other means.
        model_type: the name of the model type.
        fresh_parameters: top-level names of parameters that another model's checkpoint cannot initialise.
    """

    module: Any
    config: str = dataclasses.field(default='', kw_only=True, compare=False, repr=False)

    model_type: ClassVar[str]
    fresh_parameters: ClassVar[tuple[str, ...]] = ()

    @property
    def vocab_size(self) -> int:
        """The number of ids that the model can read."""
        return self.module.vocab_size

    def init(self, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
        """Random float32 parameters, each boxed with its logical axes (`nn.LogicallyPartitioned`).

        Args:
            rng: a key.
            batch_shapes: shapes of the token arrays of a batch, and of the segment ids if rows are packed. The
                parameters do not depend on them, but a sublayer may refuse a length, or packing.
        """
        method, inputs = self._initialised({name: jnp.ones(shape, jnp.int32) for name, shape in batch_shapes.items()})
        return self.module.init(rng, **inputs, enable_dropout=False, method=method)['params']

    def loss(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, Sums]:
        """The loss summed over what is predicted, and float32 sums to report; divide by sums['weights'] once.

        Args:
            params: unboxed parameters.
            batch: see the class.
            dropout_rng: a key; None disables dropout.
        """
        raise NotImplementedError

    def _initialised(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        """The method of the module that reaches all parameters, and its arguments from `batch`."""
        raise NotImplementedError

    def _apply(self, method: str, params: Params, *args: Any, rng: jax.Array | None = None, **kwargs: Any) -> jax.Array:
        """Calls a method of the module, with dropout if there is a key."""
        return self.module.apply(
            {'params': params},
            *args,
            **kwargs,
            enable_dropout=rng is not None,
            rngs=None if rng is None else {'dropout': rng},
            method=method,
        )


def present(batch: Batch, *names: str) -> dict[str, jax.Array]:
    """The arrays of `batch` with these names; a name that is missing is left out."""
    return {name: batch[name] for name in names if name in batch}


def targets_of(batch: Batch, side: str) -> tuple[jax.Array, jax.Array]:
    """The target tokens of 'encoder' or 'decoder' and their float32 weights, [batch, length] each."""
    targets, weights = batch[f'{side}_target_tokens'], batch.get(f'{side}_loss_weights')
    return targets, (targets > 0 if weights is None else weights).astype(jnp.float32)


def count_sequences(batch: Batch, tokens: str) -> jax.Array:
    """The number of examples in a batch, packed or not, that have a token in the array `tokens`."""
    segments = batch.get(f'{tokens.partition("_")[0]}_segment_ids')
    if segments is None:
        return jnp.sum(jnp.any(batch[tokens] > 0, axis=-1).astype(jnp.float32))
    return jnp.sum(jnp.max(segments, axis=-1).astype(jnp.float32))


def sublayers(model: Model) -> dict[str, list[Callable[..., nn.Module]]]:
    """The factories of the sublayers in the layers of each stack, 'encoder' and 'decoder', in order."""
    stacks = {side: getattr(model.module, f'{side}_stack', None) for side in ('encoder', 'decoder')}
    return {
        side: [sublayer for factory, _ in make().runs for sublayer in factory().sublayers]
        for side, make in stacks.items()
        if make is not None
    }


def param_shapes(model: Model, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
    """What `model.init` returns, with a `jax.ShapeDtypeStruct` for each array. No array is computed."""
    # Shapes do not depend on kernels, so none is checked for the lengths of this call.
    with stack.traced_once(), self_check.recording():
        return jax.eval_shape(lambda key: model.init(key, batch_shapes), jax.random.key(0))


# What some models can do in addition, by the name of the method: in words, and the model types that have it.
ABILITIES = {
    'generate': ('generates text', ('encoder_decoder', 'decoder_only')),
    'score': ('scores a text given another', ('encoder_decoder', 'decoder_only')),
    'score_choices': ('ranks choices', ('encoder_decoder', 'decoder_only')),
    'encode': ('encodes text', ('encoder_decoder', 'encoder_only', 'classifier')),
    'classify': ('gives a text a label or a number', ('classifier',)),
}


def require(model: Model, ability: str, reader: str) -> None:
    """Raises UserError if the model lacks the method `ability`, which `reader` (a command, a setting) needs."""
    if callable(getattr(model, ability, None)):
        return
    words, types = ABILITIES[ability]
    raise UserError(
        f'{reader} needs a model that {words}, and MODEL_TYPE = {model.model_type!r} has none; '
        f'use one with the model type {" or ".join(types)}'
    )


def require_type(model: Model, model_type: str, reader: str) -> None:
    """Raises UserError if the model has another type than `reader` (a command, a flag) requires."""
    if model.model_type != model_type:
        raise UserError(
            f'{reader} requires a model of type {model_type}, and MODEL_TYPE is {model.model_type!r}'
        )
