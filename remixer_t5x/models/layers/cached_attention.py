"""Self-attention and cross-attention with decoding caches.

All attention sublayers share this code for masks, dropout and caches. Call these functions within the `nn.compact`
method of a sublayer, `module`, which stores the caches as variables.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.context import EncoderMemory, SequenceContext
from remixer_t5x.kernels.attention import attention
from remixer_t5x.kernels.attention_formula import (
    Bias,
    Visibility,
    attend_decoding_step,
    attention_weights,
    expand_bias,
    memory_key_to_cache_layout,
    to_cache_layout,
)
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.dense import dropout


def attend_to_sequence(
    module: nn.Module,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    ctx: SequenceContext,
    bias: Bias = None,
    dropout_rate: float = 0.0,
    softcap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """Computes attention to the tokens of the same sequence, or to the cached tokens while decoding.

    Args:
        query: [batch, length, heads, kv].
        key, value: [batch, length, kv_heads, kv]; kv_heads must divide heads.
        bias: [1 or, in a decoding step, batch, heads, q, k] float32, a `DistanceBias`, or None.
        dropout_rate: dropout on the attention weights, with one mask per key head for all queries.
        softcap: bound c of the logits, `c tanh(logits / c)`, or None.
        window: keys at this distance or more are masked; None for no limit.

    Returns:
        [batch, length, heads, kv] in value's dtype.
    """
    dropped_value = dropout(dropout_rate, value, -1, deterministic=ctx.deterministic)
    if not ctx.decode:
        visibility = build_sequence_visibility(ctx, window)
        _sow_attention_weights(module, query, key, visibility, bias, softcap)
        return attention(query, key, dropped_value, visibility, bias, ctx.attention, softcap)
    (key_slots, axis), (value_slots, _) = to_cache_layout(key), to_cache_layout(dropped_value)
    key_slots = cache.update_cache(module, 'cached_key', key_slots, ctx, axis)
    value_slots = cache.update_cache(module, 'cached_value', value_slots, ctx, axis)
    if ctx.step is None and ctx.cache_slots is not None:
        return attention(query, key, value, build_sequence_visibility(ctx, window), bias, ctx.attention, softcap)
    if ctx.step is None:
        mask = build_sequence_visibility(ctx, window).build_mask()
    else:
        mask = jnp.atleast_2d(cache.visible_positions(key_slots.shape[axis], ctx, window))[:, None, None]
    key_slots = key_slots if key_slots.ndim == 3 else jnp.swapaxes(key_slots, 2, 3)
    return attend_decoding_step(query, key_slots, value_slots, mask, expand_bias(bias), softcap)


def attend_to_memory(
    module: nn.Module,
    query: jax.Array,
    project: Callable[[str], jax.Array],
    memory: EncoderMemory,
    ctx: SequenceContext,
    dropout_rate: float = 0.0,
    softcap: float | None = None,
) -> jax.Array:
    """Computes cross-attention to the encoder output in `memory`; see `attend_to_sequence` for the other arguments.

    `project` returns the 'key' or 'value' projection of the memory, [batch, keys, kv_heads, kv]. While decoding,
    `project` is called only in the first call, which caches the keys and values.
    """
    visibility = Visibility(ctx.segment_ids if ctx.packed else None, memory.context.segment_ids)

    def project_value() -> jax.Array:
        return dropout(dropout_rate, project('value'), -1, deterministic=ctx.deterministic)

    if not ctx.decode:
        value, key = project_value(), project('key')
        _sow_attention_weights(module, query, key, visibility, None, softcap)
        return attention(query, key, value, visibility, None, ctx.attention, softcap)
    key = module.variable('cache', 'memory_key', lambda: memory_key_to_cache_layout(project('key'))).value
    value = module.variable('cache', 'memory_value', lambda: to_cache_layout(project_value())[0]).value
    return attend_decoding_step(query, key, value, visibility.build_mask(), None, softcap)


def _sow_attention_weights(
    module: nn.Module, query: jax.Array, key: jax.Array, visibility: Visibility, bias: Bias, softcap: float | None
) -> None:
    """Recomputes the attention weights, [batch, heads, q, k], and stores them in `intermediates` for plots."""
    # `sow` also checks the collection, but without this check, training steps would trace the recomputation.
    if module.is_mutable_collection('intermediates'):
        weights = attention_weights(query, key, visibility.build_mask(), expand_bias(bias), softcap)
        module.sow('intermediates', 'attention_weights', weights)


def build_sequence_visibility(ctx: SequenceContext, window: int | None = None) -> Visibility:
    """Builds the description of the attention mask between the tokens of a sequence."""
    return Visibility(ctx.segment_ids if ctx.packed else None, ctx.segment_ids, ctx.causal, ctx.prefix, window)
