"""Attention for one decoding step: a few queries against a long cache.

A step reads the cache once and computes very little. The layout that is read fastest depends on the device:

heads first   [batch, heads, length, kv], on a CPU and a GPU. XLA:CPU reads it at the speed of memory, because the
              operands of each head's matmul are contiguous (6 times as fast as with heads between length and features).
side by side  [batch, length, heads * kv], on a TPU, which stores 128 features together: with 64 features of one head,
              half of what a step reads is padding. All heads are one matmul, with a query for each head that is zero
              for the features of the other heads: `heads` times the products, in still less time than reading takes.

Sublayers store their caches in one of these layouts, and transpose each position once, when it is written.
"""

import jax
import jax.numpy as jnp

from remixer_t5x.kernels.attention.formula import MASKED, cap_logits, group_queries, ungroup
from remixer_t5x.kernels.compile_target import rows_and_heads, target_platform


def cached(x: jax.Array) -> tuple[jax.Array, int]:
    """Keys or values [batch, length, heads, kv] in the layout of the cache, and the axis of their positions."""
    batch, _, heads, _ = x.shape
    # Devices that share the heads would have to exchange the logits of all heads.
    if target_platform() == 'tpu' and rows_and_heads(batch, heads)[1] is None:
        return x.reshape(*x.shape[:2], -1), 1
    return jnp.swapaxes(x, 1, 2), 2


def cached_memory_key(x: jax.Array) -> jax.Array:
    """Keys [batch, length, heads, kv] of the memory in the layout of the cache; heads first, a head is [kv, length]."""
    key, _ = cached(x)
    return key if key.ndim == 3 else jnp.swapaxes(key, 2, 3)


def attend_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    bias: jax.Array | None,
    softcap: float | None = None,
) -> jax.Array:
    """Attention without a scale on the logits, for decoding.

    Args:
        query: [batch, q, heads, kv].
        key: [batch, kv_heads, kv, k], or side by side [batch, k, kv_heads * kv].
        value: [batch, kv_heads, k, kv], or side by side [batch, k, kv_heads * kv].
        mask: bool, broadcastable to [batch, 1, q, k]; True where a query may see a key.
        bias: [1 or batch, heads, q, k] float32 added to the logits, or None.
        softcap: see `formula.dot_product_attention`.

    Returns:
        [batch, q, heads, kv] in value's dtype; logits and softmax are float32.
    """
    shape, side_by_side = query.shape, key.ndim == 3
    kv_heads = key.shape[2] // query.shape[3] if side_by_side else key.shape[1]
    query, mask, bias = group_queries(query, kv_heads, mask, bias)
    offset = jnp.where(mask, 0.0, MASKED)
    offset = offset if bias is None else offset + bias
    attend = _attend_side_by_side if side_by_side else _attend_heads_first
    return ungroup(attend(query, key, value, offset, softcap), shape)


def _attend_heads_first(query, key, value, offset, softcap) -> jax.Array:
    logits = jnp.einsum('bhqd,bhdk->bhqk', jnp.swapaxes(query, 1, 2), key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(cap_logits(logits, softcap) + offset, axis=-1)
    mixed = jnp.einsum('bhqk,bhkd->bhqd', weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return jnp.swapaxes(mixed, 1, 2).astype(value.dtype)


def _attend_side_by_side(query, key, value, offset, softcap) -> jax.Array:
    batch, length, heads, width = query.shape
    is_own_head = jnp.eye(heads, dtype=query.dtype)[:, :, None]  # [heads, heads of the cache, 1]
    apart = (query[:, :, :, None] * is_own_head).reshape(batch, length * heads, heads * width)
    logits = jnp.einsum('bqc,bkc->bqk', apart, key, preferred_element_type=jnp.float32)
    logits = logits.reshape(batch, length, heads, -1)
    weights = jax.nn.softmax(cap_logits(logits, softcap) + jnp.swapaxes(offset, 1, 2), axis=-1)
    weights = weights.reshape(batch, length * heads, -1).astype(value.dtype)
    mixed = jnp.einsum('bqk,bkc->bqc', weights, value, preferred_element_type=jnp.float32)
    mixed = mixed.reshape(batch, length, heads, heads, width)
    return jnp.sum(mixed * is_own_head.astype(mixed.dtype), axis=3).astype(value.dtype)
