"""Attention on a GPU with cuDNN's fused kernel, which does not write the logits to memory.

The bias has the dtype of the queries and is shared by the batch; the kernel sums its gradient over the batch. Padding
is passed as the length of each row, so tokens must precede padding, as in seqio's batches. The kernel supports
grouped-query attention, and a window in causal attention. A bidirectional window is added to the bias, because all rows
of a batch share it.

cuDNN has no segment mask. A mask in the bias would have the shape [batch, heads, q, k], for which cuDNN computes no
gradient. Packed rows therefore encode their segments as 16 additional features of each head, whose product is 0 within
a segment and at most `-_FAR` between segments: each segment is a set of 8 of these features, a query has ones in its
set, and a key has `-_FAR` outside its set. No set contains another.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.kernels.attention.formula import MASKED, Bias, Visibility, full_bias, is_within_window
from remixer_t5x.kernels.compile_target import interprets_kernels

_WIDEST_HEAD = 128
_SEGMENT_FEATURES = 16
# A power of two, exact in bfloat16, and larger than any difference of logits.
_FAR = 2.0**20


def unsupported_reason(
    query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias
) -> str | None:
    """Returns why the kernel does not support this call, or None."""
    if query.dtype != jnp.bfloat16:
        return f'requires bfloat16, got {query.dtype}'
    is_packed = visibility.query_segments is not None
    head_dim, widest = query.shape[-1], _WIDEST_HEAD - _SEGMENT_FEATURES * is_packed
    if head_dim % 8 or head_dim > widest:
        rows = 'packed rows' if is_packed else 'rows of one example'
        return f'requires head widths that are multiples of 8, at most {widest} for {rows}, got {head_dim}'
    longest, limit = max(query.shape[1], key.shape[1]), len(_segment_sets()) - 2
    return f'supports packed rows of at most {limit} tokens, got {longest}' if is_packed and longest > limit else None


def attend(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> jax.Array:
    """Computes `api.attention` for a call that `unsupported_reason` accepts."""
    full, (batch, num_queries, _, head_dim) = full_bias(bias), query.shape
    query_segments, key_segments = visibility.query_segments, visibility.key_segments
    window = visibility.window
    if window is not None and not visibility.causal:
        far = jnp.where(is_within_window(num_queries, window), 0.0, MASKED)[None, None]
        full = jnp.broadcast_to(far, (1, query.shape[2], *far.shape[2:])) if full is None else full + far
    if full is not None:
        # cuDNN computes the gradient of the bias only for even lengths.
        query, key, value = (_pad_to_even(array, 1) for array in (query, key, value))
        full = _pad_to_even(_pad_to_even(full.astype(query.dtype), 2), 3)
    lengths = {}
    if query_segments is None:
        lengths['query_seq_lengths'] = jnp.full((batch,), num_queries, jnp.int32)
        lengths['key_value_seq_lengths'] = jnp.sum(key_segments > 0, axis=1, dtype=jnp.int32)
    else:
        query, key, value = _with_segments(query, key, value, query_segments, key_segments)
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=full,
        scale=1.0,
        is_causal=visibility.causal,
        local_window_size=(window - 1, 0) if window is not None and visibility.causal else None,
        implementation='xla' if interprets_kernels() else 'cudnn',
        **lengths,
    )
    return mixed[:, :num_queries, :, :head_dim]


def _with_segments(
    query: jax.Array, key: jax.Array, value: jax.Array, query_segments: jax.Array, key_segments: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends the segment features to the heads; tokens that pad a row to an even length have no segment."""
    query_segments, key_segments = (
        jnp.pad(segments, ((0, 0), (0, array.shape[1] - segments.shape[1])), constant_values=-1)
        for segments, array in ((query_segments, query), (key_segments, key))
    )
    # -1 selects the last set, which no segment uses.
    query_sets, key_sets = (jnp.asarray(_segment_sets(), query.dtype)[ids] for ids in (query_segments, key_segments))
    # A query without a visible key averages all values, as in the formula.
    has_key = jnp.any(query_segments[:, :, None] == key_segments[:, None], axis=2)[..., None]
    query, query_sets = jnp.where(has_key[..., None], query, 0), jnp.where(has_key, query_sets, 0)

    def append(array: jax.Array, features: jax.Array) -> jax.Array:
        spread = jnp.broadcast_to(features[:, :, None], (*array.shape[:3], _SEGMENT_FEATURES))
        return jnp.concatenate([array, spread], axis=-1)

    return append(query, query_sets), append(key, _FAR * (key_sets - 1)), append(value, jnp.zeros_like(key_sets))


@functools.cache
def _segment_sets() -> np.ndarray:
    """Returns the set of features of each segment as zeros and ones, [segments, features]."""
    members = itertools.combinations(range(_SEGMENT_FEATURES), _SEGMENT_FEATURES // 2)
    return np.eye(_SEGMENT_FEATURES)[np.array(list(members))].sum(axis=1)


def _pad_to_even(array: jax.Array, axis: int) -> jax.Array:
    return jnp.pad(array, [(0, size % 2 if at == axis else 0) for at, size in enumerate(array.shape)])
