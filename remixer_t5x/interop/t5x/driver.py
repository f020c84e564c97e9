"""Adapts remixer_t5x encoder-decoders to the train, eval and infer scripts of T5X (Roberts et al. 2022).

Converts module arguments and the format of parameter axes, and allocates decoding caches. Requires T5X, which is not on
PyPI (docs/t5x.md). Only configs/t5x/*.gin import this module.
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
from remixer_t5x.models.architecture.stack import unstack_layers


class _T5XModule(EncoderDecoder):
    """An `EncoderDecoder` that accepts the arguments of T5X's modules.

    The logits are float32, because T5X computes the loss in the dtype of the logits. T5X also passes the decoder
    targets, so that the module can find padding; this module ignores them.
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
    """T5X's encoder-decoder model with a remixer_t5x module.

    Args:
        module: an encoder-decoder, configured by models/*.gin.
        **settings: arguments of `t5x.models.EncoderDecoderModel`.
    """

    def __init__(self, module: EncoderDecoder, **settings: Any):
        if not isinstance(module, EncoderDecoder):
            raise UserError(
                f'T5X requires an encoder-decoder, got {type(module).__name__}; train this model with '
                '`remixer-t5x train`'
            )
        fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module) if field.init}
        super().__init__(module=_T5XModule(**(fields | {'parent': None, 'name': None})), **settings)

    def get_initial_variables(
        self,
        rng: jax.Array,
        input_shapes: Mapping[str, Any],
        input_types: Mapping[str, Any] | None = None,
    ) -> flax.core.FrozenDict:
        """Returns parameters in `params` and their logical axes in `params_axes`, as T5X expects."""
        types = dict.fromkeys(input_shapes, jnp.int32) | dict(input_types or {})
        boxed = super().get_initial_variables(rng, input_shapes, types)['params']
        flat = traverse_util.flatten_dict(flax.core.unfreeze(boxed))
        params = {path: box.value for path, box in flat.items()}
        axes = {(*path[:-1], f'{path[-1]}_axes'): partitioning.AxisMetadata(box.names) for path, box in flat.items()}
        collections = {'params': params, 'params_axes': axes}
        return flax.core.freeze({name: traverse_util.unflatten_dict(tree) for name, tree in collections.items()})

    def predict_batch_with_aux(self, params: Any, batch: Mapping[str, jax.Array], *args: Any, **kwargs: Any) -> Any:
        """Generates outputs as in T5X, but unstacks the layers once instead of slicing them at every decoding step."""
        params = {**params, 'decoder': unstack_layers(params['decoder'])}
        return super().predict_batch_with_aux(params, batch, *args, **kwargs)

    def _compute_kv_cache(
        self,
        params: Any,
        encoded_inputs: jax.Array,
        encoder_input_tokens: jax.Array,
        decoder_input_tokens: jax.Array,
        prefill_decoder_prompt: bool = False,
    ) -> tuple[Any, None]:
        """Allocates the caches from the actual inputs, because a cache also stores the cross-attention keys and values.

        T5X allocates caches from dummy inputs, and recomputes the cross-attention keys and values at every step.
        """
        if prefill_decoder_prompt:
            raise ValueError('prefill_decoder_prompt is not supported')
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


def register_task(task: seqio.Task | seqio.Mixture | str) -> str:
    """Registers a task in seqio's registry, which T5X uses, and returns its name.

    Replaces an existing task with the same name. If `task` is a name, it is returned unchanged.
    """
    if isinstance(task, str):
        return task
    for provider in (*task.tasks, task) if isinstance(task, seqio.Mixture) else (task,):
        registry = seqio.MixtureRegistry if isinstance(provider, seqio.Mixture) else seqio.TaskRegistry
        if provider.name in registry.names():
            registry.remove(provider.name)
        registry.add_provider(provider.name, provider)
    return task.name
