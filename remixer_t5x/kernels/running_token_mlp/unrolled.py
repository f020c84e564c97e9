"""One block of the running token MLP in operations that XLA fuses, for GPUs and for calls without a TPU kernel.

A block is divided into segments of five tokens. A matmul computes A before every segment, in the dtype of the tokens.
Within a segment the tokens are unrolled, so that A stays in registers. The forward pass is one kernel for all segments,
which writes sums over hidden units. The backward pass loops over segments. One kernel writes sums over features and the
gradient of A after each token, in the dtype of the tokens. Small kernels compute the gradients of `w_in` and `value`
from it. docs/forecast.md lists the costs of other formulations.
"""

import jax
import jax.numpy as jnp

from remixer_t5x.kernels.blocks import join_blocks, split_blocks
from remixer_t5x.kernels.gelu import sigmoid_gelu, sigmoid_gelu_and_slope
from remixer_t5x.kernels.running_token_mlp.block_loop import Activation, BlockGradients, Tokens, zero_sum

# XLA:GPU writes intermediate values of A to memory if it unrolls more tokens.
_SEGMENT = 5
_LONGEST_BLOCK = 120


def block_length(w_in: jax.Array, value: jax.Array) -> int:
    """The number of tokens of a block: the whole row, or a multiple of the segment for blocks of similar length."""
    length = value.shape[1]
    blocks = -(-length // _LONGEST_BLOCK)
    return length if blocks == 1 else -(-length // (blocks * _SEGMENT)) * _SEGMENT


def forward(activation: Activation, tokens: Tokens, start: jax.Array | None) -> jax.Array:
    """Computes [batch, tokens, heads, features] in value's dtype; `start` is A before the block, None for zeros."""
    function, segments = _fast_activation(activation), split_blocks(tokens, _SEGMENT)
    # A is transposed, because XLA fuses more sums over the last axis.
    sums = _running_sums(segments.value, segments.w_in, segments, _starts('nbhfk', tokens, start))
    mixed = [jnp.sum(function(total) * _columns(segments.w_out, t), axis=-1) for t, total in enumerate(sums)]
    return join_blocks(jnp.stack(mixed, axis=2), tokens.value.shape[1]).astype(tokens.value.dtype)


def backward(
    activation: Activation, tokens: Tokens, start: jax.Array | None, later: jax.Array | None, gradient: jax.Array
) -> BlockGradients:
    """Computes the gradients of a block; arguments as in `tpu.backward`."""
    function, length, dtype = _fast_activation(activation), tokens.value.shape[1], tokens.value.dtype

    def split_sum(total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns two arrays in the dtype of the tokens whose sum is `total` with twice the precision of this dtype."""
        # XLA may remove conversions to bfloat16 and back, but not `reduce_precision`.
        high = jax.lax.reduce_precision(total, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        return high.astype(dtype), (total - high).astype(dtype)

    def join_sum(high: jax.Array, low: jax.Array) -> jax.Array:
        return high.astype(jnp.float32) + low.astype(jnp.float32)

    def segment_gradients(parts: tuple[jax.Array, jax.Array], inputs):
        index, tokens, gradient = inputs
        later = join_sum(*parts)
        start = jax.lax.dynamic_index_in_dim(starts, index, axis=3, keepdims=False)
        sums = [*enumerate(_running_sums(tokens.w_in, tokens.value, tokens, start))]
        w_out_gradient = [jnp.sum(function(total) * _columns(gradient, t), axis=-1) for t, total in sums]
        sum_gradients = []
        for t, total in reversed(sums):
            slope = _activation_slope(activation, total) * _per_row(tokens.scale, t)
            later = later + slope * _rows(tokens.w_out, t) * _columns(gradient, t)
            sum_gradients.append(later.astype(dtype))
            later = later * _per_row(tokens.keep, t)
        high, low = split_sum(later)
        # Without `keep`, the gradient of the first token is `high`, and is written once.
        parts = sum_gradients[-1] if tokens.keep is None else high, low
        # Otherwise XLA would recompute the gradients of A for each sum.
        sum_gradients, parts, w_out_gradient = jax.lax.optimization_barrier((sum_gradients, parts, w_out_gradient))
        of_sums = [(t, array.astype(jnp.float32)) for t, array in enumerate(reversed(sum_gradients))]
        w_in_gradient = [jnp.sum(array * _columns(tokens.value, t), axis=-1) for t, array in of_sums]
        value_gradient = [jnp.sum(array * _rows(tokens.w_in, t), axis=-2) for t, array in of_sums]
        gradients = w_in_gradient, value_gradient, w_out_gradient
        return parts, [jnp.stack(arrays, axis=1).astype(dtype) for arrays in gradients]

    # XLA would copy the array to make the segments its first axis.
    starts = _starts('bhknf', tokens, start)
    inputs = jnp.arange(starts.shape[3]), split_blocks(tokens, _SEGMENT), split_blocks(gradient, _SEGMENT)
    parts = split_sum(zero_sum(tokens) if later is None else later)
    parts, gradients = jax.lax.scan(segment_gradients, parts, inputs, reverse=True)
    w_in, value, w_out = (join_blocks(array, length) for array in gradients)
    return BlockGradients(w_in, value, w_out, None if start is None else join_sum(*parts))


def _starts(axes: str, tokens: Tokens, start: jax.Array | None) -> jax.Array:
    """Computes A before each segment in the dtype of the tokens.

    Args:
        axes: order of the axes of the result: segments (n), batch (b), heads (h), hidden (k) and features (f).
        tokens: the tokens of the block.
        start: A before the block, or None for zeros.
    """
    length, dtype = tokens.value.shape[1], tokens.value.dtype
    first = jnp.arange(0, length, _SEGMENT)
    is_added = (jnp.arange(length) < first[:, None])[:, None]  # [segments, batch or 1, tokens]
    keep = jnp.ones((len(first), tokens.value.shape[0]), jnp.float32)
    if tokens.keep is not None:
        examples = jnp.cumsum(tokens.keep == 0, axis=1)  # number of examples that start up to each token
        before = jnp.pad(examples, ((0, 0), (1, 0)))[:, first].T  # [segments, batch], up to the previous token
        is_added = is_added & (examples == before[..., None])
        keep = (before == 0).astype(jnp.float32)
    # Without the barrier, the mask of a scanned layer would be an array of this size, computed before the scan.
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
    # The barrier stores this dtype and not float32.
    return jax.lax.optimization_barrier(starts.astype(dtype))


def _running_sums(rows: jax.Array, columns: jax.Array, tokens: Tokens, start: jax.Array) -> list[jax.Array]:
    """Computes scale A of each token of a segment, [..., heads, rows, columns] float32.

    Args:
        rows, columns: [..., tokens, heads, .], either `w_in` and `value`, or `value` and `w_in` for A transposed.
        tokens: the tokens of the segment.
        start: A before the segment.
    """
    total, scaled = start.astype(jnp.float32), []
    for t in range(_SEGMENT):
        total = total * _per_row(tokens.keep, t) + _rows(rows, t) * _columns(columns, t)
        scaled.append(total * _per_row(tokens.scale, t))
    return scaled


def _fast_activation(activation: Activation) -> Activation:
    """Returns GELU with one exponential; CUDA's tanh computes two formulas and selects one."""
    return sigmoid_gelu if activation is jax.nn.gelu else activation


def _activation_slope(activation: Activation, x: jax.Array) -> jax.Array:
    if activation is jax.nn.gelu:
        return sigmoid_gelu_and_slope(x)[1]
    return jax.jvp(activation, (x,), (jnp.ones_like(x),))[1]


def _rows(array: jax.Array, t: int) -> jax.Array:
    return array[..., t, :, :, None].astype(jnp.float32)


def _columns(array: jax.Array, t: int) -> jax.Array:
    return array[..., t, :, None, :].astype(jnp.float32)


def _per_row(array: jax.Array | None, t: int) -> jax.Array | float:
    return 1.0 if array is None else array[..., t, None, None, None]
