"""Our encoder-decoders as models of T5X (Roberts et al. 2022), for its train, eval and infer.

This file adapts the arguments of modules, the format of parameter axes, and the allocation of decoding caches to T5X.
It needs T5X, which is not on PyPI (docs/t5x.md). Only configs/t5x/*.gin import this file.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import seqio
from flax import traverse_util
from flax.linen import partitioning
from t5x import models

from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.stack import layers_apart


class _WideLogits(EncoderDecoder):
    """`EncoderDecoder` with T5X's arguments, and float32 logits for any `dtype`: T5X computes its loss in their dtype.

    T5X passes the decoder's targets to find its padding, which our decoder does not need.
    """

    def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens=None, **kwargs) -> jax.Array:
        return super().__call__(encoder_input_tokens, decoder_input_tokens, **kwargs)

    def decode(
        self, encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens=None, **kwargs
    ) -> jax.Array:
        return super().decode(encoded, encoder_input_tokens, decoder_input_tokens, **kwargs)

    def decode_hidden(self, *args, **kwargs) -> jax.Array:
        return super().decode_hidden(*args, **kwargs).astype(jnp.float32)


class EncoderDecoderModel(models.EncoderDecoderModel):
    """T5X's model around an `EncoderDecoder`; everything but `module` is T5X's.

    Args:
        module: the encoder-decoder that models/*.gin configure.
        **settings: arguments of `t5x.models.EncoderDecoderModel`.
    """

    def __init__(self, module: EncoderDecoder, **settings: Any):
        if not isinstance(module, EncoderDecoder):
            kind = type(module).__name__
            raise UserError(f't5x/*.gin require an encoder-decoder, got {kind}; train it with `remixer-t5x train`')
        fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module) if field.init}
        super().__init__(module=_WideLogits(**(fields | {'parent': None, 'name': None})), **settings)

    def get_initial_variables(
        self,
        rng: jax.Array,
        input_shapes: Mapping[str, Any],
        input_types: Mapping[str, Any] | None = None,
    ) -> flax.core.FrozenDict:
        """Parameters in `params`, and their logical axes in `params_axes`, where T5X expects them."""
        types = dict.fromkeys(input_shapes, jnp.int32) | dict(input_types or {})
        boxed = super().get_initial_variables(rng, input_shapes, types)['params']
        flat = traverse_util.flatten_dict(flax.core.unfreeze(boxed))
        params = {path: box.value for path, box in flat.items()}
        axes = {(*path[:-1], f'{path[-1]}_axes'): partitioning.AxisMetadata(box.names) for path, box in flat.items()}
        collections = {'params': params, 'params_axes': axes}
        return flax.core.freeze({name: traverse_util.unflatten_dict(tree) for name, tree in collections.items()})

    def predict_batch_with_aux(self, params: Any, batch: Mapping[str, jax.Array], *args: Any, **kwargs: Any) -> Any:
        """As in T5X, but unstacks layers once, so that no decoding step slices stacked parameters."""
        params = {**params, 'decoder': layers_apart(params['decoder'])}
        return super().predict_batch_with_aux(params, batch, *args, **kwargs)

    def _compute_kv_cache(
        self,
        params: Any,
        encoded_inputs: jax.Array,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        prefill_decoder_prompt: bool = False,
    ) -> tuple[Any, None]:
        """Allocates caches for the real inputs, because our caches hold everything that depends only on the encoder's
        output.

        T5X would allocate them for inputs of ones, and computes keys and values of the memory again at every step.
        """
        if prefill_decoder_prompt:
            raise ValueError('a prompt of the decoder is read token by token, not in one call')
        _, variables = self.module.apply(
            {'params': params},
            encoded_inputs,
            encoder_input_tokens,
            decoder_input_tokens,
            enable_dropout=False,
            decode=True,
            max_decode_length=decoder_input_tokens.shape[1],
            mutable=['cache'],
            method='decode_hidden',
        )
        return variables['cache'], None


def registered(task: seqio.Task | seqio.Mixture | str) -> str:
    """Registers `task` in seqio's registry, where T5X looks tasks up, and returns its name.

    Replaces an earlier task of that name. If `task` is a name, returns it.
    """
    if isinstance(task, str):
        return task
    if isinstance(task, seqio.Mixture):
        for member in task.tasks:
            _register(seqio.TaskRegistry, member)
    _register(seqio.MixtureRegistry if isinstance(task, seqio.Mixture) else seqio.TaskRegistry, task)
    return task.name


def _register(registry: Any, provider: Any) -> None:
    if provider.name in registry.names():
        registry.remove(provider.name)
    registry.add_provider(provider.name, provider)
