"""Computes one block of the running token MLP with operations that XLA fuses, for GPUs and as a fallback on TPUs.

A matmul computes the state A before every segment of five tokens, in the dtype of the tokens. Within a segment, the
loop over tokens is unrolled, so that A remains in registers. The forward pass is a single GPU kernel for all segments.
The backward pass loops over segments: one kernel writes the gradient of `w_out` and the gradient of A after each token,
in the dtype of the tokens; smaller kernels compute the gradients of `w_in` and `value` from the gradient of A.
docs/forecast.md lists the costs of alternatives.
"""

import jax
import jax.numpy as jnp

from remixer_t5x.kernels.gelu import sigmoid_gelu, sigmoid_gelu_and_slope
from remixer_t5x.kernels.reshaping import join_blocks, split_blocks
from remixer_t5x.kernels.running_token_mlp_loop import BlockGradients, TokenArrays, zero_state

# Number of tokens in a segment. With more tokens, XLA:GPU would write intermediate values of A to memory.
_SEGMENT_LENGTH = 5
_MAX_BLOCK_LENGTH = 120


def choose_block_length(w_in: jax.Array, value: jax.Array) -> int:
    """Returns the number of tokens per block: the whole row, or a multiple of the segment length."""
    length = value.shape[1]
    blocks = -(-length // _MAX_BLOCK_LENGTH)
    return length if blocks == 1 else -(-length // (blocks * _SEGMENT_LENGTH)) * _SEGMENT_LENGTH


def forward(tokens: TokenArrays, start: jax.Array | None) -> jax.Array:
    """Computes the outputs of a block; has the same interface as `running_token_mlp_tpu.forward`."""
    segments = split_blocks(tokens, _SEGMENT_LENGTH)
    # Transpose A, because XLA can fuse more sums over the last axis than over other axes.
    starts = _compute_states_before_segments('nbhfk', tokens, start)
    states = _compute_states_after_tokens(segments.value, segments.w_in, segments, starts)
    mixed = [
        jnp.sum(sigmoid_gelu(state) * _select_token_columns(segments.w_out, t), axis=-1)
        for t, state in enumerate(states)
    ]
    return join_blocks(jnp.stack(mixed, axis=2), tokens.value.shape[1]).astype(tokens.value.dtype)


def backward(
    tokens: TokenArrays, start: jax.Array | None, later: jax.Array | None, gradient: jax.Array
) -> BlockGradients:
    """Computes the gradients of a block; has the same interface as `running_token_mlp_tpu.backward`."""
    length, dtype = tokens.value.shape[1], tokens.value.dtype

    def split_state_precision(state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Splits `state` into two arrays in the dtype of the tokens, whose sum has twice the precision."""
        # Use `reduce_precision`, because XLA may remove conversions to bfloat16 and back.
        high = jax.lax.reduce_precision(state, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        return high.astype(dtype), (state - high).astype(dtype)

    def join_state_precision(high: jax.Array, low: jax.Array) -> jax.Array:
        return high.astype(jnp.float32) + low.astype(jnp.float32)

    def compute_segment_gradients(parts: tuple[jax.Array, jax.Array], inputs):
        index, tokens, gradient = inputs
        later = join_state_precision(*parts)
        start = jax.lax.dynamic_index_in_dim(starts, index, axis=3, keepdims=False)
        states = [*enumerate(_compute_states_after_tokens(tokens.w_in, tokens.value, tokens, start))]
        w_out_gradient = [
            jnp.sum(sigmoid_gelu(state) * _select_token_columns(gradient, t), axis=-1) for t, state in states
        ]
        state_gradients = []
        for t, state in reversed(states):
            slope = sigmoid_gelu_and_slope(state)[1] * _select_token_factor(tokens.scale, t)
            later = later + slope * _select_token_rows(tokens.w_out, t) * _select_token_columns(gradient, t)
            state_gradients.append(later.astype(dtype))
            later = later * _select_token_factor(tokens.keep, t)
        high, low = split_state_precision(later)
        # Without `keep`, `high` equals the last array in `state_gradients`, so reuse that array.
        parts = state_gradients[-1] if tokens.keep is None else high, low
        # Without this barrier, XLA would recompute the gradients of A for every sum below.
        state_gradients, parts, w_out_gradient = jax.lax.optimization_barrier((state_gradients, parts, w_out_gradient))
        gradients_by_token = [(t, array.astype(jnp.float32)) for t, array in enumerate(reversed(state_gradients))]
        w_in_gradient = [
            jnp.sum(array * _select_token_columns(tokens.value, t), axis=-1) for t, array in gradients_by_token
        ]
        value_gradient = [
            jnp.sum(array * _select_token_rows(tokens.w_in, t), axis=-2) for t, array in gradients_by_token
        ]
        gradients = w_in_gradient, value_gradient, w_out_gradient
        return parts, [jnp.stack(arrays, axis=1).astype(dtype) for arrays in gradients]

    # Index this array in the loop. To scan it, segments would have to be its first axis, and XLA would copy the array.
    starts = _compute_states_before_segments('bhknf', tokens, start)
    inputs = jnp.arange(starts.shape[3]), split_blocks(tokens, _SEGMENT_LENGTH), split_blocks(gradient, _SEGMENT_LENGTH)
    parts = split_state_precision(zero_state(tokens) if later is None else later)
    parts, gradients = jax.lax.scan(compute_segment_gradients, parts, inputs, reverse=True)
    w_in, value, w_out = (join_blocks(array, length) for array in gradients)
    return w_in, value, w_out, None if start is None else join_state_precision(*parts)


def _compute_states_before_segments(axes: str, tokens: TokenArrays, start: jax.Array | None) -> jax.Array:
    """Computes the state A before each segment, in the dtype of the tokens.

    `axes` specifies the axis order of the result: segments (n), batch (b), heads (h), hidden (k) and features (f).
    """
    length, dtype = tokens.value.shape[1], tokens.value.dtype
    first = jnp.arange(0, length, _SEGMENT_LENGTH)
    is_added = (jnp.arange(length) < first[:, None])[:, None]  # [segments, 1, tokens]
    keep = jnp.ones((len(first), tokens.value.shape[0]), jnp.float32)
    if tokens.keep is not None:
        examples = jnp.cumsum(tokens.keep == 0, axis=1)  # number of examples that start at or before each token
        before = jnp.pad(examples, ((0, 0), (1, 0)))[:, first].T  # [segments, batch], examples that start before
        is_added = is_added & (examples == before[..., None])
        keep = (before == 0).astype(jnp.float32)
    # Without this barrier, XLA would compute the broadcast mask before a scan over layers and store it.
    value, is_added = jax.lax.optimization_barrier((tokens.value, is_added))
    value = jnp.where(is_added[..., None, None], value, 0)
    starts = jnp.einsum(
        f'bthk,nbthf->{axes}',
        tokens.w_in,
        value,
        preferred_element_type=dtype if start is None else jnp.float32,
        precision=jax.lax.Precision.HIGHEST,
    )
    if start is not None:
        starts = starts + jnp.einsum(f'nb,bhkf->{axes}', keep, start)
    # With this barrier, XLA stores the states in the dtype of the tokens, and not in float32.
    return jax.lax.optimization_barrier(starts.astype(dtype))


def _compute_states_after_tokens(
    rows: jax.Array, columns: jax.Array, tokens: TokenArrays, start: jax.Array
) -> list[jax.Array]:
    """Computes A after each token of a segment, multiplied by `scale`, [..., heads, rows, columns] float32.

    `rows` and `columns` are `w_in` and `value`, or the reverse for the transpose of A.
    """
    state, scaled = start.astype(jnp.float32), []
    for t in range(_SEGMENT_LENGTH):
        state = state * _select_token_factor(tokens.keep, t) + _select_token_rows(rows, t) * _select_token_columns(
            columns, t
        )
        scaled.append(state * _select_token_factor(tokens.scale, t))
    return scaled


def _select_token_rows(array: jax.Array, t: int) -> jax.Array:
    return array[..., t, :, :, None].astype(jnp.float32)


def _select_token_columns(array: jax.Array, t: int) -> jax.Array:
    return array[..., t, :, None, :].astype(jnp.float32)


def _select_token_factor(array: jax.Array | None, t: int) -> jax.Array | float:
    return 1.0 if array is None else array[..., t, None, None, None]
