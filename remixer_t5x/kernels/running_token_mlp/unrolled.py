"""One block of the running token MLP in operations that XLA fuses, for GPUs and what the TPU kernel does not support.

The tokens of a block are unrolled, so that A stays in registers while they pass. The forward pass writes only sums over
hidden units. The backward pass writes the gradient of A after each token once, in the dtype of the tokens.

docs/forecast.md compares this with kernels: XLA:GPU fuses at most eight sums, so several kernels recompute A.
"""

import jax
import jax.numpy as jnp

from remixer_t5x.kernels.gelu import sigmoid_form, sigmoid_form_and_slope
from remixer_t5x.kernels.running_token_mlp.block_loop import Activation, BlockGradients, Tokens

# More tokens move A less often, but XLA compiles longer and splits the unrolled operations into more kernels.
_LONGEST_BLOCK = 20


def block_length(w_in: jax.Array, value: jax.Array) -> int:
    """The number of tokens of a block, for blocks of equal length."""
    length = value.shape[1]
    return -(-length // -(-length // _LONGEST_BLOCK))


def forward(activation: Activation, tokens: Tokens, start: jax.Array | None) -> jax.Array:
    """Computes [batch, tokens, heads, features] in value's dtype; `start` is A before the block, None for zeros."""
    function = _function(activation)
    mixed = [jnp.sum(function(x) * _rows(tokens.w_out, t), -2) for t, x in enumerate(_running_sums(tokens, start))]
    return jnp.stack(mixed, axis=1).astype(tokens.value.dtype)


def backward(
    activation: Activation, tokens: Tokens, start: jax.Array | None, later: jax.Array | None, gradient: jax.Array
) -> BlockGradients:
    """Computes the gradients of a block; arguments as in `tpu.backward`."""
    dtype = tokens.value.dtype
    function = _function(activation)
    of_w_out = [jnp.sum(function(x) * _columns(gradient, t), -1) for t, x in enumerate(_running_sums(tokens, start))]
    # Otherwise XLA sees that both passes need the same sums, and writes all of them.
    tokens, start, gradient = jax.lax.optimization_barrier((tokens, start, gradient))
    of_sums = []
    for t, total in reversed([*enumerate(_running_sums(tokens, start))]):
        slope = _slope(activation, total) * _per_row(tokens.scale, t)
        own = slope * _rows(tokens.w_out, t) * _columns(gradient, t)
        later = own if later is None else later + own
        of_sums.append(later.astype(dtype))
        later = later * _per_row(tokens.keep, t)
    of_sums, later = jax.lax.optimization_barrier((of_sums[::-1], later))
    of_w_in = [jnp.sum(array.astype(jnp.float32) * _columns(tokens.value, t), -1) for t, array in enumerate(of_sums)]
    of_value = [jnp.sum(array.astype(jnp.float32) * _rows(tokens.w_in, t), -2) for t, array in enumerate(of_sums)]
    of_w_in, of_value, of_w_out = (jnp.stack(parts, axis=1).astype(dtype) for parts in (of_w_in, of_value, of_w_out))
    return BlockGradients(of_w_in, of_value, of_w_out, None if start is None else later)


def _running_sums(tokens: Tokens, start: jax.Array | None) -> list[jax.Array]:
    """scale A of each token, [batch, heads, rows of w_in, columns of value] float32."""
    total, scaled = start, []
    for t in range(tokens.value.shape[1]):
        own = _rows(tokens.w_in, t) * _columns(tokens.value, t)
        total = own if total is None else total * _per_row(tokens.keep, t) + own
        scaled.append(total * _per_row(tokens.scale, t))
    return scaled


def _function(activation: Activation) -> Activation:
    """GELU with one exponential; CUDA's tanh computes two formulas and selects one."""
    return sigmoid_form if activation is jax.nn.gelu else activation


def _slope(activation: Activation, x: jax.Array) -> jax.Array:
    if activation is jax.nn.gelu:
        return sigmoid_form_and_slope(x)[1]
    return jax.jvp(activation, (x,), (jnp.ones_like(x),))[1]


def _rows(array: jax.Array, t: int) -> jax.Array:
    return array[:, t, :, :, None].astype(jnp.float32)


def _columns(array: jax.Array, t: int) -> jax.Array:
    return array[:, t, :, None, :].astype(jnp.float32)


def _per_row(array: jax.Array | None, t: int) -> jax.Array | float:
    return 1.0 if array is None else array[:, t, None, None, None]
