"""Decoder-only language models."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.context import count_tokens
from remixer_t5x.errors import UserError
from remixer_t5x.models import decoding
from remixer_t5x.models.architecture.decoder_only import DecoderOnly
from remixer_t5x.models.interface import Batch, GenerativeModel, Params, select_batch_arrays


@dataclasses.dataclass(frozen=True)
class LanguageModel(GenerativeModel):
    """Decoder-only language model.

    A batch contains the arrays of seqio's LMFeatureConverter, [batch, length] int32: decoder_input_tokens,
    decoder_target_tokens, decoder_loss_weights, and for packed rows decoder_segment_ids and decoder_positions. With
    PrefixLMFeatureConverter, batches also contain decoder_causal_attention.

    If the batch contains `prompt_tokens` [batch, prompt_length], `score` and `score_and_match_targets` compute
    log p(decoder_target_tokens | prompt_tokens).

    Attributes:
        prefix: whether attention is bidirectional within prompts, whose positions `decoder_causal_attention` marks.
    """

    module: DecoderOnly
    prefix: bool = False

    model_type = 'decoder_only'
    input_array = 'prompt_tokens'

    def score_and_match_targets(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        if 'prompt_tokens' in batch:
            batch = join_prompts_and_targets(batch['prompt_tokens'], batch['decoder_target_tokens'])
        return super().score_and_match_targets(params, batch)

    def _init_method_and_inputs(self, batch: Batch) -> tuple[str, dict[str, Any]]:
        tokens = batch['decoder_target_tokens']
        prefix = tokens > 0 if self.prefix else None
        return '__call__', {
            'decoder_input_tokens': tokens,
            'prefix': prefix,
            **select_batch_arrays(batch, 'decoder_segment_ids'),
        }

    def _compute_hidden(self, params: Params, batch: Batch, rng: jax.Array | None = None) -> jax.Array:
        arrays = select_batch_arrays(batch, 'decoder_input_tokens', 'decoder_segment_ids', 'decoder_positions')
        return self._apply_module('decode_hidden', params, **arrays, prefix=self._build_prefix_mask(batch), rng=rng)

    def _build_prefix_mask(self, batch: Batch) -> jax.Array | None:
        if not self.prefix:
            return None
        if 'decoder_causal_attention' not in batch:
            raise UserError(
                'PREFIX_LM must be False for tasks without inputs, got True; set PREFIX_LM = False, or use a task with '
                "inputs and set their length, for example TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 114}"
            )
        return batch['decoder_causal_attention'] > 0

    def _encode_for_generation(
        self, params: Params, prompts: jax.Array, max_length: int, eos_id: int = 1
    ) -> decoding.GenerationInputs:
        params = self._prepare_decoding_params(params)
        slots = prompts.shape[1] + max_length
        # Prepend the start token, id 0, as in training.
        tokens, count = jnp.pad(prompts, ((0, 0), (1, 0))), count_tokens(prompts)
        is_token = jnp.arange(tokens.shape[1]) <= count[:, None]

        def apply_module(method: str, *args: Any, **cache: Any) -> tuple[jax.Array, decoding.Cache]:
            hidden, variables = self.module.apply({'params': params, **cache}, *args, mutable=['cache'], method=method)
            return hidden, variables['cache']

        def allocate_cache(rows_per_sequence: int) -> decoding.Cache:
            cache = apply_module('prefill_prompts', tokens, is_token, slots, self.prefix)[1]
            return jax.tree.map(lambda leaf: jnp.repeat(leaf, rows_per_sequence, axis=0), cache)

        def decode_step(tokens: jax.Array, cache: decoding.Cache) -> tuple[jax.Array, decoding.Cache]:
            hidden, cache = apply_module('decode_next_hidden', tokens[:, None], slots, cache=cache)
            return self._compute_next_logits(params, hidden), cache

        last = jnp.take_along_axis(tokens, count[:, None], axis=1)[:, 0]
        # Right-align the prompts, as logits processors and stop strings require.
        source = jnp.arange(tokens.shape[1]) - (prompts.shape[1] - count[:, None])
        aligned = jnp.where(source < 0, -1, jnp.take_along_axis(tokens, jnp.maximum(source, 0), axis=1))
        if self.module.begin_id:
            aligned = jnp.where(source == 0, self.module.begin_id, aligned)
        return decoding.GenerationInputs(
            prompts.shape[0], allocate_cache, decode_step, max_length, eos_id, last, aligned
        )


def join_prompts_and_targets(prompts: jax.Array, targets: jax.Array) -> dict[str, jax.Array]:
    """Concatenates prompts [batch, prompt_length] and targets [batch, target_length] into the rows of a batch.

    Loss weights are nonzero only for the targets.
    """
    count = count_tokens(prompts)[:, None]
    tokens = jnp.concatenate([prompts, targets], axis=1)
    position = jnp.arange(tokens.shape[1])
    # Positions after the targets read the 0 that `jnp.pad` appends to each row.
    source = jnp.where(position < count, position, position - count + prompts.shape[1])
    tokens = jnp.take_along_axis(jnp.pad(tokens, ((0, 0), (0, 1))), jnp.minimum(source, tokens.shape[1]), axis=1)
    return {
        'decoder_target_tokens': tokens,
        'decoder_input_tokens': jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
        'decoder_loss_weights': ((position >= count) & (tokens > 0)).astype(jnp.int32),
        'decoder_causal_attention': (position <= count).astype(jnp.int32),
    }
