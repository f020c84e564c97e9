"""Attention on GPUs with cuDNN's fused kernel, which does not write the logits to memory.

All rows of the batch share the bias, so the kernel sums its gradient over the rows. The length of each row specifies
its padding, so tokens must precede padding. cuDNN supports windows only in causal attention; in bidirectional
attention, the mask of the window is added to the bias.

cuDNN does not support segment masks, and computes no gradient of a bias [batch, heads, q, k] that could contain such a
mask. For packed rows, 16 additional features of each head therefore encode the segments. Each segment has a different
set of 8 of these features. A query has the value 1 at each feature in its segment's set, and 0 at the other features. A
key has the value 0 at each feature in its segment's set, and `-_OTHER_SEGMENT_PENALTY` at the other features. Because
no set contains another, the inner product of these features is 0 within a segment and at most `-_OTHER_SEGMENT_PENALTY`
between segments. There are 12,870 sets, enough for all examples of a row.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.kernels.attention_formula import MASKED_LOGIT, Bias, Visibility, build_window_mask, expand_bias
from remixer_t5x.kernels.compile_target import is_interpreting_kernels

_MAX_HEAD_DIM = 128
_SEGMENT_FEATURES = 16
# The penalty exceeds any difference between logits. Powers of two are exact in bfloat16.
_OTHER_SEGMENT_PENALTY = 2.0**20


def unsupported_reason(
    query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias
) -> str | None:
    """Returns the reason why the kernel does not support this call, or None if the call is supported."""
    if query.dtype != jnp.bfloat16:
        return f'requires bfloat16, got {query.dtype}'
    is_packed = visibility.query_segments is not None
    head_dim, max_head_dim = query.shape[-1], _MAX_HEAD_DIM - _SEGMENT_FEATURES * is_packed
    if head_dim % 8 or head_dim > max_head_dim:
        rows = 'packed rows' if is_packed else 'rows of one example'
        return f'requires head widths that are multiples of 8 and at most {max_head_dim} for {rows}, got {head_dim}'
    return None


def attend(query: jax.Array, key: jax.Array, value: jax.Array, visibility: Visibility, bias: Bias) -> jax.Array:
    """Computes the same result as `attention.attention`; `unsupported_reason` must return None for this call."""
    full, (batch, num_queries, _, head_dim) = expand_bias(bias), query.shape
    query_segments, key_segments = visibility.query_segments, visibility.key_segments
    window = visibility.window
    if window is not None and not visibility.causal:
        window_bias = jnp.where(build_window_mask(num_queries, window), 0.0, MASKED_LOGIT)
        window_bias = jnp.broadcast_to(window_bias, (1, query.shape[2], *window_bias.shape))
        full = window_bias if full is None else full + window_bias
    if full is not None:
        # cuDNN computes the gradient of the bias only for even lengths.
        query, key, value = (_pad_to_even(array, 1) for array in (query, key, value))
        full = _pad_to_even(_pad_to_even(full.astype(query.dtype), 2), 3)
    lengths = {}
    if query_segments is None:
        lengths['query_seq_lengths'] = jnp.full((batch,), num_queries, jnp.int32)
        lengths['key_value_seq_lengths'] = jnp.sum(key_segments > 0, axis=1, dtype=jnp.int32)
    else:
        query, key, value = _append_segment_features(query, key, value, query_segments, key_segments)
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias=full,
        scale=1.0,
        is_causal=visibility.causal,
        local_window_size=(window - 1, 0) if window is not None and visibility.causal else None,
        implementation='xla' if is_interpreting_kernels() else 'cudnn',
        **lengths,
    )
    return mixed[:, :num_queries, :, :head_dim]


def _append_segment_features(
    query: jax.Array, key: jax.Array, value: jax.Array, query_segments: jax.Array, key_segments: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends the features that encode the segments to each head."""
    query_segments, key_segments = (
        jnp.pad(segments, ((0, 0), (0, array.shape[1] - segments.shape[1])), constant_values=-1)
        for segments, array in ((query_segments, query), (key_segments, key))
    )
    # Tokens that pad a row to an even length have the segment id -1, which selects the last set, unused by segments.
    query_sets, key_sets = (
        jnp.asarray(_build_segment_sets(), query.dtype)[ids] for ids in (query_segments, key_segments)
    )
    # Queries without visible keys return the mean of all values, as in the plain-JAX implementation.
    has_key = jnp.any(query_segments[:, :, None] == key_segments[:, None], axis=2)[..., None]
    query, query_sets = jnp.where(has_key[..., None], query, 0), jnp.where(has_key, query_sets, 0)

    def append_features(array: jax.Array, features: jax.Array) -> jax.Array:
        spread = jnp.broadcast_to(features[:, :, None], (*array.shape[:3], _SEGMENT_FEATURES))
        return jnp.concatenate([array, spread], axis=-1)

    return (
        append_features(query, query_sets),
        append_features(key, _OTHER_SEGMENT_PENALTY * (key_sets - 1)),
        append_features(value, jnp.zeros_like(key_sets)),
    )


@functools.cache
def _build_segment_sets() -> np.ndarray:
    """Returns a mask of the features in each segment's set, [segments, features], with zeros and ones."""
    members = itertools.combinations(range(_SEGMENT_FEATURES), _SEGMENT_FEATURES // 2)
    return np.eye(_SEGMENT_FEATURES)[np.array(list(members))].sum(axis=1)


def _pad_to_even(array: jax.Array, axis: int) -> jax.Array:
    return jnp.pad(array, [(0, size % 2 if at == axis else 0) for at, size in enumerate(array.shape)])
