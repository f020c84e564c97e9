"""A block of `mix` in operations that XLA fuses: A and its gradient stay in registers while the tokens pass.

The tokens of a block are unrolled. The forward pass computes hidden units and their sums in few kernels. The backward
pass is one kernel that writes hidden units and gradients of A in the dtype of the tokens, and sums that read them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from remixer_t5x.layers.gelu import sigmoid_form, sigmoid_form_and_slope
from remixer_t5x.layers.running_token_mlp.blocks import BlockGradients, Tokens

_FLOAT32 = jnp.float32
# A program has operations for each token of a block, and A is in memory between blocks.
_LONGEST_BLOCK = 20


def block_length(w_in: jax.Array, value: jax.Array) -> int:
    """Tokens of a block, for blocks of equal length."""
    length = value.shape[1]
    blocks = -(-length // _LONGEST_BLOCK)
    return -(-length // blocks)


def forward(activation: Callable, tokens: Tokens, start: jax.Array | None) -> jax.Array:
    """[batch, tokens, heads, features] in value's dtype; `start` is A before the block, or None for zeros."""
    units = [_function(activation)(hidden) for hidden in _scaled_sums(tokens, start)]
    mixed = [jnp.sum(_hidden(tokens.w_out, t) * of_token, axis=2) for t, of_token in enumerate(units)]
    return jnp.stack(mixed, axis=1).astype(tokens.value.dtype)


def backward(
    activation: Callable, tokens: Tokens, start: jax.Array | None, later: jax.Array | None, gradient: jax.Array
) -> BlockGradients:
    """Gradients of a block, given the gradients of its output and of A after it; `later` is None if `start` is."""
    dtype, units, of_sums = tokens.value.dtype, [], []
    for t, hidden in reversed([*enumerate(_scaled_sums(tokens, start))]):
        of_token, slope = _function_and_slope(activation)(hidden)
        own = _by_row(tokens.scale, t) * slope * _hidden(tokens.w_out, t) * _features(gradient, t)
        later = own if later is None else later + own
        units.append(of_token.astype(dtype))
        of_sums.append(later.astype(dtype))
        later = later * _by_row(tokens.keep, t)
    # Otherwise XLA computes the chain of sums again for each of the arrays that follow, or writes it in float32.
    units, of_sums, later = jax.lax.optimization_barrier((units[::-1], of_sums[::-1], later))

    def totals(arrays: list[jax.Array], factor: Callable[[int], jax.Array], axis: int) -> jax.Array:
        parts = [jnp.sum(array.astype(_FLOAT32) * factor(t), axis=axis) for t, array in enumerate(arrays)]
        return jnp.stack(parts, axis=1).astype(dtype)

    return BlockGradients(
        totals(of_sums, lambda t: _features(tokens.value, t), 3),
        totals(of_sums, lambda t: _hidden(tokens.w_in, t), 2),
        totals(units, lambda t: _features(gradient, t), 3),
        None if start is None else later,
    )


def _function(activation: Callable) -> Callable:
    """GELU with one exponential: CUDA's tanh is two formulas, of which it selects one. Both are exact to rounding."""
    return sigmoid_form if activation is jax.nn.gelu else activation


def _function_and_slope(activation: Callable) -> Callable:
    if activation is jax.nn.gelu:
        return sigmoid_form_and_slope
    return lambda hidden: jax.jvp(activation, (hidden,), (jnp.ones_like(hidden),))


def _scaled_sums(tokens: Tokens, start: jax.Array | None) -> list[jax.Array]:
    """What each token reads before the activation, [batch, heads, hidden, features] float32."""
    total, scaled = start, []
    for t in range(tokens.value.shape[1]):
        own = _hidden(tokens.w_in, t) * _features(tokens.value, t)
        total = own if total is None else total * _by_row(tokens.keep, t) + own
        scaled.append(total * _by_row(tokens.scale, t))
    return scaled


def _hidden(array: jax.Array, t: int) -> jax.Array:
    return array[:, t, :, :, None].astype(_FLOAT32)


def _features(array: jax.Array, t: int) -> jax.Array:
    return array[:, t, :, None, :].astype(_FLOAT32)


def _by_row(array: jax.Array | None, t: int) -> jax.Array | float:
    return 1.0 if array is None else array[:, t, None, None, None]
