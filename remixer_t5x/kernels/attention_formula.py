"""Plain-JAX implementation of attention, softmax(query key^T + bias) value.

As in FlashAttention (Dao et al. 2022), the backward pass recomputes the attention weights from the log-sum-exp of each
query's logits, instead of storing the [batch, heads, q, k] weights. A single CPU processes one row of the batch at a
time, so that its logits remain in cache.
"""

import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.compile_target import targets_single_cpu
from remixer_t5x.kernels.reshaping import build_toeplitz_matrices

# Checkpoint name of the arrays that the remat policy `dots_remat` saves instead of recomputing.
ATTENTION_OUTPUT = 'attention_output'

# Logit of masked keys. The value is finite, because with -inf, queries without visible keys (padding) would yield NaN.
MASKED_LOGIT = -1e10


@struct.dataclass
class DistanceBias:
    """Compact form of a relative position bias, `bias[0, head, q, k] = by_distance[head, k - q + length - 1]`."""

    by_distance: jax.Array  # [heads, 2 * length - 1] float32

    def expand_to_pairs(self) -> jax.Array:
        """Returns the bias for each pair of query and key, [1, heads, length, length] float32."""
        return build_toeplitz_matrices(self.by_distance, (self.by_distance.shape[1] + 1) // 2)[None]


# An attention bias: an array [1, heads, q, k], a relative position bias, or None.
Bias: TypeAlias = 'jax.Array | DistanceBias | None'


def expand_bias(bias: Bias) -> jax.Array | None:
    """Returns the bias for each pair of query and key, [1, heads, q, k] float32, or None."""
    return bias.expand_to_pairs() if isinstance(bias, DistanceBias) else bias


def split_bias(bias: Bias, parts: int) -> list[Bias]:
    """Splits a bias along the heads axis into `parts` equal parts."""
    if isinstance(bias, DistanceBias):
        return [DistanceBias(values) for values in jnp.split(bias.by_distance, parts)]
    return [None] * parts if bias is None else [*jnp.split(bias, parts, axis=1)]


@struct.dataclass
class Visibility:
    """Compact description of an attention mask, without a [query, key] array.

    Attributes:
        query_segments: [batch, queries] int32, the example id of each query; None if each row is a single example,
            whose tokens are visible to all queries.
        key_segments: [batch, keys] int32, the example id of each key; 0 is padding.
        causal: whether to mask the keys after the position of each query.
        key_prefix: [batch, keys] bool, True for keys that are visible to all queries of their example, or None.
        window: keys at a distance of `window` or more from a query are masked; None for no limit.
    """

    query_segments: jax.Array | None
    key_segments: jax.Array
    causal: bool = struct.field(pytree_node=False, default=False)
    key_prefix: jax.Array | None = None
    window: int | None = struct.field(pytree_node=False, default=None)

    def build_mask(self) -> jax.Array:
        """Returns a bool mask, broadcastable to [batch, 1, queries, keys]; True if a query attends to a key."""
        if self.query_segments is None:
            allowed = (self.key_segments > 0)[:, None, None, :]
        else:
            allowed = self.query_segments[:, None, :, None] == self.key_segments[:, None, None, :]
        if self.window is not None:
            allowed = allowed & build_window_mask(self.key_segments.shape[1], self.window)
        if not self.causal:
            return allowed
        before = jnp.tri(self.key_segments.shape[1], dtype=bool)
        return allowed & (before if self.key_prefix is None else before | self.key_prefix[:, None, None, :])


def build_window_mask(length: int, window: int) -> jax.Array:
    """Returns a mask of all pairs of positions with a distance below `window`, bool [length, length]."""
    position = jnp.arange(length)
    return jnp.abs(position[:, None] - position) < window


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    bias: jax.Array | None,
    softcap: float | None = None,
) -> jax.Array:
    """Computes the same result as `attention.attention`.

    `mask` is bool, broadcastable to [batch, 1, q, k], and `bias` is [1, heads, q, k] float32 or None.
    """
    grouped = group_queries(query, key.shape[2], mask, bias)
    return ungroup_queries(_attention_with_recomputation(grouped[0], key, value, *grouped[1:], softcap), query.shape)


def group_queries(
    query: jax.Array, kv_heads: int, mask: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Turns query heads that share a key head into additional queries, for grouped-query attention.

    Returns queries [batch, q * group, kv_heads, kv], with a matching mask and bias.
    """
    batch, length, heads, width = query.shape
    group = heads // kv_heads
    if group == 1:
        return query, mask, bias
    query = jnp.swapaxes(query.reshape(batch, length, kv_heads, group, width), 2, 3)
    if mask.shape[2] > 1:
        mask = jnp.repeat(mask, group, axis=2)
    if bias is not None:
        bias = bias.reshape(bias.shape[0], kv_heads, group, length, -1)
        bias = jnp.swapaxes(bias, 2, 3).reshape(bias.shape[0], kv_heads, length * group, -1)
    return query.reshape(batch, length * group, kv_heads, width), mask, bias


def ungroup_queries(mixed: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverts `group_queries` for attention outputs; `shape` is [batch, q, heads, kv]."""
    batch, length, heads, width = shape
    kv_heads = mixed.shape[2]
    if heads == kv_heads:
        return mixed
    return jnp.swapaxes(mixed.reshape(batch, length, -1, kv_heads, width), 2, 3).reshape(shape)


def cap_logits(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Bounds the logits with `softcap * tanh(logits / softcap)`, or returns them unchanged if softcap is None."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


def attention_weights(
    query: jax.Array, key: jax.Array, mask: jax.Array, bias: jax.Array | None, softcap: float | None = None
) -> jax.Array:
    """Computes the attention weights of `dot_product_attention`, [batch, heads, q, k] float32."""
    mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
    shared = None if bias is None else bias[0]
    if query.shape[2] != key.shape[2]:
        key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    return jax.nn.softmax(
        jax.vmap(lambda q, k, m: _compute_row_logits(q, k, m, shared, softcap)[0])(query, key, mask), axis=-1
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention_with_recomputation(query, key, value, mask, bias, softcap):
    """Computes attention for equal numbers of query heads and key heads."""
    return _forward_rule(query, key, value, mask, bias, softcap)[0]


def _forward_rule(query, key, value, mask, bias, softcap):
    mask = jnp.broadcast_to(mask, (query.shape[0], *mask.shape[1:]))
    shared, rows = None if bias is None else bias[0], (query, key, value, mask)
    run = jax.lax.map if targets_single_cpu() else lambda function, rows: jax.vmap(function)(rows)
    mixed, log_total = run(lambda row: _compute_row_attention(softcap, shared, *row), rows)
    mixed, log_total = (checkpoint_name(array, ATTENTION_OUTPUT) for array in (mixed, log_total))
    return mixed, (query, key, value, mask, bias, mixed, log_total)


def _backward_rule(softcap, residuals, gradient):
    query, key, value, mask, bias, mixed, log_total = residuals
    shared = None if bias is None else bias[0]
    rows = (query, key, value, mask, mixed, log_total, gradient)
    if targets_single_cpu():

        def add_row_gradients(total, row):
            *gradients, bias_gradient = _compute_row_gradients(softcap, shared, *row)
            return jax.tree.map(jnp.add, total, bias_gradient), gradients

        bias_gradient, gradients = jax.lax.scan(add_row_gradients, jax.tree.map(jnp.zeros_like, shared), rows)
    else:
        *gradients, bias_gradient = jax.vmap(lambda *row: _compute_row_gradients(softcap, shared, *row))(*rows)
        bias_gradient = jax.tree.map(lambda rows: jnp.sum(rows, axis=0), bias_gradient)
    return *gradients, None, jax.tree.map(lambda array: array[None], bias_gradient)


_attention_with_recomputation.defvjp(_forward_rule, _backward_rule)


def _compute_row_logits(query, key, mask, bias, softcap) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of one row with and without the mask and the bias, both [heads, q, k] float32."""
    logits = cap_logits(jnp.einsum('qhd,khd->hqk', query, key, preferred_element_type=jnp.float32), softcap)
    offset = jnp.where(mask, 0.0, MASKED_LOGIT)
    return logits + (offset if bias is None else offset + bias), logits


def _compute_row_attention(softcap, bias, query, key, value, mask) -> tuple[jax.Array, jax.Array]:
    """Computes the output [q, heads, kv] and the log-sum-exp of the logits [heads, q] of one row."""
    logits, _ = _compute_row_logits(query, key, mask, bias, softcap)
    largest = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - largest[..., None])
    total = jnp.sum(weights, axis=-1)
    mixed = jnp.einsum('hqk,khd->qhd', weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return (mixed / total.T[..., None]).astype(value.dtype), largest + jnp.log(total)


def _compute_row_gradients(softcap, bias, query, key, value, mask, mixed, log_total, gradient):
    """Computes the gradients of one row's query, key and value, and its contribution to the bias gradient."""
    logits, capped = _compute_row_logits(query, key, mask, bias, softcap)
    weights = jnp.exp(logits - log_total[..., None])
    value_gradient = jnp.einsum('hqk,qhd->khd', weights.astype(value.dtype), gradient)
    weights_gradient = jnp.einsum('qhd,khd->hqk', gradient, value, preferred_element_type=jnp.float32)
    delta = jnp.sum(mixed.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
    logits_gradient = weights * (weights_gradient - delta.T[..., None])
    product_gradient = logits_gradient if softcap is None else logits_gradient * (1 - (capped / softcap) ** 2)
    cast_gradient = product_gradient.astype(query.dtype)
    query_gradient = jnp.einsum('hqk,khd->qhd', cast_gradient, key)
    key_gradient = jnp.einsum('hqk,qhd->khd', cast_gradient, query)
    return query_gradient, key_gradient, value_gradient, None if bias is None else logits_gradient
