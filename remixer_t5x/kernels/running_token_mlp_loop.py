"""Computes one block of the running token MLP with a loop over tokens, for CPUs and as the reference for self-checks.

The backward pass restores A_{t-1} from A_t by subtracting the outer product of token t. To prevent rounding errors from
accumulating, A is recomputed at the end of each example and block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenArrays(NamedTuple):
    """Weights and values of the tokens in whole rows or in one block."""

    w_in: jax.Array  # [batch, tokens, heads, hidden]
    value: jax.Array  # [batch, tokens, heads, features]
    w_out: jax.Array  # [batch, tokens, heads, hidden]
    # [batch, tokens] float32, 0 at the first token of an example, otherwise 1; None if rows are not packed
    keep: jax.Array | None
    scale: jax.Array | None  # [batch, tokens] float32, factor of the state A before the activation; None for 1


# Gradients of `w_in`, `value` and `w_out` of a block, and of the state A before the block, which is None if there is no
# preceding block.
BlockGradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


def zero_state(tokens: TokenArrays) -> jax.Array:
    """Returns the state A before the first token of a row, zeros [batch, heads, hidden, features]."""
    batch, _, heads, hidden = tokens.w_in.shape
    return jnp.zeros((batch, heads, hidden, tokens.value.shape[-1]), jnp.float32)


def add_token_to_state(hidden: jax.Array, w_in: jax.Array, value: jax.Array) -> jax.Array:
    """Adds a token to the state A: the outer product of w_in [..., hidden] and value [..., features]."""
    return hidden + _outer_product(w_in.astype(jnp.float32), value.astype(jnp.float32))


def compute_token_output(w_out: jax.Array, hidden: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Computes the output of a token, `w_out . gelu(scale A)`, [batch, heads, features]."""
    units = jax.nn.gelu(hidden if scale is None else hidden * _append_state_axes(scale)).astype(w_out.dtype)
    return jnp.einsum('bhk,bhkf->bhf', w_out, units)


def choose_block_length(w_in: jax.Array, value: jax.Array) -> int:
    """Returns the number of tokens per block: at most the number of hidden units, with blocks of equal length."""
    length, hidden = value.shape[1], w_in.shape[-1]
    return -(-length // -(-length // hidden))


def forward(tokens: TokenArrays, start: jax.Array | None) -> jax.Array:
    """Computes the outputs of a block; has the same interface as `running_token_mlp_tpu.forward`."""

    def mix_token(hidden: jax.Array, token: TokenArrays) -> tuple[jax.Array, jax.Array]:
        hidden = add_token_to_state(_reset_state(hidden, token.keep), token.w_in, token.value)
        return hidden, compute_token_output(token.w_out, hidden, token.scale)

    first = zero_state(tokens) if start is None else start
    _, mixed = jax.lax.scan(mix_token, first, jax.tree.map(_swap_batch_and_length, tokens))
    return _swap_batch_and_length(mixed).astype(tokens.value.dtype)


def backward(
    tokens: TokenArrays, start: jax.Array | None, later: jax.Array | None, gradient: jax.Array
) -> BlockGradients:
    """Computes the gradients of a block; has the same interface as `running_token_mlp_tpu.backward`."""
    first = zero_state(tokens) if start is None else start
    index = jnp.arange(tokens.value.shape[1])
    # Number of examples that start in the block, up to and including each token.
    starts = None if tokens.keep is None else jnp.cumsum(tokens.keep == 0, axis=1)
    exact, gradient = jax.tree.map(lambda array: array.astype(jnp.float32), (tokens, gradient))

    def compute_state_after(position: jax.Array) -> jax.Array:
        """Computes the state A after the token at `position` from all tokens up to it."""
        is_added = index <= position
        if starts is not None:
            is_added = is_added & (starts == starts[:, position, None])
        w_in = jnp.where(is_added[..., None, None], exact.w_in, 0)
        total = jnp.einsum('bthk,bthf->bhkf', w_in, exact.value)
        return total + _reset_state(first, None if starts is None else (starts[:, position] == 0).astype(jnp.float32))

    def compute_token_gradients(carry, inputs):
        (hidden, later), (position, token, gradient) = carry, inputs
        scale = 1.0 if token.scale is None else _append_state_axes(token.scale)
        units, pull_back = jax.vjp(lambda hidden: jax.nn.gelu(hidden * scale), hidden)
        grad_w_out = jnp.einsum('bhkf,bhf->bhk', units, gradient)
        later = later + pull_back(_outer_product(token.w_out, gradient))[0]
        grad_w_in = jnp.einsum('bhkf,bhf->bhk', later, token.value)
        grad_value = jnp.einsum('bhkf,bhk->bhf', later, token.w_in)
        before = hidden - _outer_product(token.w_in, token.value)
        if token.keep is not None:
            before = jax.lax.cond(jnp.any(token.keep == 0), lambda: compute_state_after(position - 1), lambda: before)
        return (before, _reset_state(later, token.keep)), (grad_w_in, grad_value, grad_w_out)

    carry = compute_state_after(index[-1]), jnp.zeros_like(first) if later is None else later
    inputs = index, *jax.tree.map(_swap_batch_and_length, (exact, gradient))
    (_, later), gradients = jax.lax.scan(compute_token_gradients, carry, inputs, reverse=True)
    w_in, value, w_out = (
        _swap_batch_and_length(array).astype(like.dtype) for array, like in zip(gradients, tokens[:3], strict=True)
    )
    return w_in, value, w_out, None if start is None else later


def _outer_product(w: jax.Array, value: jax.Array) -> jax.Array:
    return w[..., None] * value[..., None, :]


def _reset_state(hidden: jax.Array, keep: jax.Array | None) -> jax.Array:
    """Sets the state A to 0 in the rows for which `keep` is 0."""
    return hidden if keep is None else hidden * _append_state_axes(keep)


def _append_state_axes(array: jax.Array) -> jax.Array:
    return array[:, None, None, None]


def _swap_batch_and_length(array: jax.Array) -> jax.Array:
    return jnp.swapaxes(array, 0, 1)
