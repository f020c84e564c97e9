"""Computes attention on a GPU with cuDNN's fused kernel, which never writes the logits to memory.

The kernel takes the bias of all logits in the dtype of the queries, shared by the batch, and returns its gradient
summed over the batch. Padding is passed as a length: tokens come first in a row and padding follows, as in seqio's
batches. It supports grouped-query attention, and a window in causal attention. A window on both sides is part of the
bias, since all rows of a batch share it.

The kernel has no mask of segments, and a mask inside the bias would be [batch, heads, q, k] and cost the bias its
gradient. So packed rows put their segments into the heads, as 16 more features whose product is 0 within a segment and
`-_FAR` or less between segments: a segment is a set of 8 of these features, a query is 1 in its set, and a key is
`-_FAR` outside its set. No set contains another one.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.kernels.attention.formula import MASKED, Bias, Visibility, full_bias, is_near
from remixer_t5x.kernels.compile_target import interprets_kernels

_WIDEST_HEAD = 128
_SEGMENT_FEATURES = 16
# A power of two, exact in bfloat16, and larger than any difference of logits.
_FAR = 2.0**20


def refusal(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> str | None:
    """Returns why cuDNN cannot compute this call, or None."""
    if query.dtype != jnp.bfloat16:
        return f'computes in bfloat16 and not in {query.dtype}'
    is_packed = visibility.query_segments is not None
    head_dim, widest = query.shape[-1], _WIDEST_HEAD - _SEGMENT_FEATURES * is_packed
    if head_dim % 8 or head_dim > widest:
        rows = 'packed rows' if is_packed else 'rows of one example'
        return f'needs heads of a multiple of 8 up to {widest} features for {rows}, got {head_dim}'
    longest, limit = max(query.shape[1], key.shape[1]), len(_segment_sets()) - 2
    return f'takes packed rows of up to {limit} tokens, got {longest}' if is_packed and longest > limit else None


def attend(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> jax.Array:
    """Computes `api.attention` of a call for which `refusal` is None."""
    full, (batch, num_queries, _, head_dim) = full_bias(bias), query.shape
    query_segments, key_segments = visibility.query_segments, visibility.key_segments
    window = visibility.window
    if window is not None and not visibility.causal:
        far = jnp.where(is_near(num_queries, window), 0.0, MASKED)[None, None]
        full = jnp.broadcast_to(far, (1, query.shape[2], *far.shape[2:])) if full is None else full + far
    if full is not None:
        # cuDNN computes the gradient of a bias for even lengths only.
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
    """Appends the features of segments to the heads; tokens that were added to a row are of no segment."""
    query_segments, key_segments = (
        jnp.pad(segments, ((0, 0), (0, array.shape[1] - segments.shape[1])), constant_values=-1)
        for segments, array in ((query_segments, query), (key_segments, key))
    )
    # -1 takes the last set, which belongs to no segment.
    of_query, of_key = (jnp.asarray(_segment_sets(), query.dtype)[ids] for ids in (query_segments, key_segments))
    # A query without a key averages all keys, as in the formula.
    sees = jnp.any(query_segments[:, :, None] == key_segments[:, None], axis=2)[..., None]
    query, of_query = jnp.where(sees[..., None], query, 0), jnp.where(sees, of_query, 0)

    def append(array: jax.Array, features: jax.Array) -> jax.Array:
        spread = jnp.broadcast_to(features[:, :, None], (*array.shape[:3], _SEGMENT_FEATURES))
        return jnp.concatenate([array, spread], axis=-1)

    return append(query, of_query), append(key, _FAR * (of_key - 1)), append(value, jnp.zeros_like(of_key))


@functools.cache
def _segment_sets() -> np.ndarray:
    """[segments, features], 1 in the set of a segment."""
    members = itertools.combinations(range(_SEGMENT_FEATURES), _SEGMENT_FEATURES // 2)
    return np.eye(_SEGMENT_FEATURES)[np.array(list(members))].sum(axis=1)


def _pad_to_even(array: jax.Array, axis: int) -> jax.Array:
    return jnp.pad(array, [(0, size % 2 if at == axis else 0) for at, size in enumerate(array.shape)])
