"""Self-attention and cross-attention with decoding caches.

All attention sublayers share this code for masks, dropout and caches. Call these functions within the `nn.compact`
method of a sublayer, `module`, which stores the caches as variables.

A decoding step has few queries and a long cache of keys and values, and spends most of its time on reading the cache.
The fastest cache layout depends on the device:

heads first     [batch, heads, length, kv], on CPUs and GPUs. The operands of each head's matmul are contiguous, so
                XLA:CPU reads the cache at full memory bandwidth, 6 times as fast as [batch, length, heads, kv].
feature-packed  [batch, length, heads * kv], on TPUs, whose tiles have 128 lanes: if the last axis were the 64 features
                of one head, half of the bytes would be padding. A single matmul computes all heads, with queries that
                are zero for the features of other heads. This matmul still takes less time than reading the cache.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.context import EncoderMemory, SequenceContext
from remixer_t5x.kernels.attention import attention
from remixer_t5x.kernels.attention_formula import (
    MASKED_LOGIT,
    Bias,
    Visibility,
    attention_weights,
    cap_logits,
    expand_bias,
    group_queries,
    ungroup_queries,
)
from remixer_t5x.kernels.compile_target import get_batch_and_head_axes, get_target_platform
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
    return attend_decoding_step(query, transpose_keys(key_slots), value_slots, mask, expand_bias(bias), softcap)


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
    key = module.variable('cache', 'memory_key', lambda: transpose_keys(to_cache_layout(project('key'))[0])).value
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


def to_cache_layout(x: jax.Array) -> tuple[jax.Array, int]:
    """Converts keys or values [batch, length, heads, kv] to the cache layout; also returns the position axis."""
    batch, _, heads, _ = x.shape
    # With sharded heads, the feature-packed layout would require devices to exchange the logits of all heads.
    if get_target_platform() == 'tpu' and get_batch_and_head_axes(batch, heads)[1] is None:
        return x.reshape(*x.shape[:2], -1), 1
    return jnp.swapaxes(x, 1, 2), 2


def transpose_keys(key: jax.Array) -> jax.Array:
    """Converts heads-first keys to [batch, heads, kv, length] for `attend_decoding_step`; others are unchanged."""
    return key if key.ndim == 3 else jnp.swapaxes(key, 2, 3)


def attend_decoding_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    bias: jax.Array | None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes unscaled dot-product attention for a decoding step.

    Args:
        query: [batch, q, heads, kv].
        key: [batch, kv_heads, kv, k], or feature-packed [batch, k, kv_heads * kv].
        value: [batch, kv_heads, k, kv], or feature-packed [batch, k, kv_heads * kv].
        mask: bool, broadcastable to [batch, 1, q, k]; True if a query attends to a key.
        bias: [1 or batch, heads, q, k] float32, or None.
        softcap: bound c of the logits, `c tanh(logits / c)`, or None.

    Returns:
        [batch, q, heads, kv] in value's dtype.
    """
    shape, is_packed = query.shape, key.ndim == 3
    kv_heads = key.shape[2] // query.shape[3] if is_packed else key.shape[1]
    query, mask, bias = group_queries(query, kv_heads, mask, bias)
    offset = jnp.where(mask, 0.0, MASKED_LOGIT)
    offset = offset if bias is None else offset + bias
    attend = _attend_feature_packed if is_packed else _attend_heads_first
    return ungroup_queries(attend(query, key, value, offset, softcap), shape)


def _attend_heads_first(query, key, value, offset, softcap) -> jax.Array:
    logits = jnp.einsum('bhqd,bhdk->bhqk', jnp.swapaxes(query, 1, 2), key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(cap_logits(logits, softcap) + offset, axis=-1)
    mixed = jnp.einsum('bhqk,bhkd->bhqd', weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return jnp.swapaxes(mixed, 1, 2).astype(value.dtype)


def _attend_feature_packed(query, key, value, offset, softcap) -> jax.Array:
    batch, length, heads, width = query.shape
    same_head = jnp.eye(heads, dtype=query.dtype)[:, :, None]  # [heads, heads of the cache, 1]
    masked_query = (query[:, :, :, None] * same_head).reshape(batch, length * heads, heads * width)
    logits = jnp.einsum('bqc,bkc->bqk', masked_query, key, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, length, heads, -1)
    weights = jax.nn.softmax(cap_logits(logits, softcap) + jnp.swapaxes(offset, 1, 2), axis=-1)
    weights = weights.reshape(batch, length * heads, -1).astype(value.dtype)
    mixed = jnp.einsum('bqk,bkc->bqc', weights, value, preferred_element_type=jnp.float32)
    mixed = mixed.reshape(batch, length, heads, heads, width)
    return jnp.sum(mixed * same_head.astype(mixed.dtype), axis=3).astype(value.dtype)
