"""Attention for a decoding step, with few queries and a long cache of keys and values.

A decoding step spends most of its time on reading the cache. The fastest cache layout depends on the device:

heads first     [batch, heads, length, kv], on CPUs and GPUs. The operands of each head's matmul are contiguous, so
                XLA:CPU reads the cache at full memory bandwidth, 6 times as fast as [batch, length, heads, kv].
feature-packed  [batch, length, heads * kv], on TPUs, whose tiles have 128 lanes: if the last axis were the 64 features
                of one head, half of the bytes would be padding. A single matmul computes all heads, with queries that
                are zero for the features of other heads. It still takes less time than reading the cache.
"""

import jax
import jax.numpy as jnp

from remixer_t5x.kernels.attention.formula import MASKED_LOGIT, cap_logits, group_queries, ungroup_queries
from remixer_t5x.kernels.compile_target import batch_and_head_axes, target_platform


def to_cache_layout(x: jax.Array) -> tuple[jax.Array, int]:
    """Converts keys or values [batch, length, heads, kv] to the cache layout; also returns the position axis."""
    batch, _, heads, _ = x.shape
    # With sharded heads, the feature-packed layout would require devices to exchange the logits of all heads.
    if target_platform() == 'tpu' and batch_and_head_axes(batch, heads)[1] is None:
        return x.reshape(*x.shape[:2], -1), 1
    return jnp.swapaxes(x, 1, 2), 2


def memory_key_to_cache_layout(x: jax.Array) -> jax.Array:
    """Converts cross-attention keys [batch, length, heads, kv] to the cache layout, or to [batch, heads, kv, length].

    The second layout is used on CPUs and GPUs.
    """
    key, _ = to_cache_layout(x)
    return key if key.ndim == 3 else jnp.swapaxes(key, 2, 3)


def attend_step(
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
