"""The window MLP for GPUs, with operations that XLA fuses so that hidden units remain in registers.

XLA generates three GPU kernels: for the forward pass, the gradient of `out` and the gradient of the hidden units.
These kernels compute the hidden units from the tokens. Only the gradient of the hidden units is written to memory,
[batch, blocks, block * hidden, features] in the dtype of the tokens, because two matmuls read it. Blocks are at least
as long as the window, so a window lies within a block and the previous block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.gelu import prevent_cse, sigmoid_gelu, sigmoid_gelu_and_slope
from remixer_t5x.kernels.reshaping import (
    build_same_example_mask,
    expand_window_weights,
    join_previous_blocks,
    split_blocks,
)

_FLOAT32 = jnp.float32
# Limit on the program size, because the program contains a multiplication for each token of the window.
_MAX_WINDOW_LENGTH = 64


def unsupported_reason(wi: jax.Array, tokens: jax.Array) -> str | None:
    """Returns the reason why the kernel does not support this call, or None if the call is supported."""
    return f'supports windows of at most {_MAX_WINDOW_LENGTH} tokens' if wi.shape[0] > _MAX_WINDOW_LENGTH else None


@jax.custom_vjp
def apply_mlp(wi: jax.Array, bias: jax.Array, out: jax.Array, tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Computes the window MLP without the output bias; see `window_mlp_tpu.apply_mlp` for the arguments."""
    return _forward_rule(wi, bias, out, tokens, ids)[0]


def _forward_rule(*operands: Any) -> tuple[jax.Array, Any]:
    wi, bias, out, tokens, ids = operands
    units = sigmoid_gelu(_compute_pre_activations(wi, bias, tokens, ids))
    mixed = jnp.sum(_broadcast_over_tokens(out) * units, axis=2).astype(tokens.dtype)
    return checkpoint_name(mixed, ATTENTION_OUTPUT), operands


def _backward_rule(operands: Any, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    wi, bias, out, tokens, ids = operands
    gradient = gradient.astype(_FLOAT32)[:, :, None]
    units = sigmoid_gelu(_compute_pre_activations(prevent_cse(wi.astype(_FLOAT32), 1), bias, tokens, ids))
    out_gradient = jnp.sum(units * gradient, axis=(1, 3))
    _, slope = sigmoid_gelu_and_slope(_compute_pre_activations(prevent_cse(wi.astype(_FLOAT32), 2), bias, tokens, ids))
    hidden_gradient = (_broadcast_over_tokens(out) * slope * gradient).astype(tokens.dtype)
    wi_gradient, bias_gradient, token_gradient = _compute_input_gradients(wi, tokens, ids, hidden_gradient)
    gradients = zip((wi, bias, out), (wi_gradient, bias_gradient, out_gradient), strict=True)
    return *(gradient.astype(weights.dtype) for weights, gradient in gradients), token_gradient, None


apply_mlp.defvjp(_forward_rule, _backward_rule)


def _broadcast_over_tokens(out: jax.Array) -> jax.Array:
    return out.astype(_FLOAT32)[:, None, :, None]


def _compute_pre_activations(wi: jax.Array, bias: jax.Array, tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Returns the hidden units before the activation, [batch, length, hidden, features] float32."""
    window, length = wi.shape[0], tokens.shape[1]
    padded = jnp.pad(tokens, ((0, 0), (window - 1, 0), (0, 0)))
    padded_ids = None if ids is None else jnp.pad(ids, ((0, 0), (window - 1, 0)))
    total = bias.astype(_FLOAT32)[:, None]
    for offset in range(window):
        shifted = padded[:, offset : offset + length]
        if padded_ids is not None:
            shifted = jnp.where((padded_ids[:, offset : offset + length] == ids)[..., None], shifted, 0)
        total = total + wi[offset].astype(_FLOAT32)[:, None] * shifted.astype(_FLOAT32)[:, :, None]
    return total


def _compute_input_gradients(
    wi: jax.Array, tokens: jax.Array, ids: jax.Array | None, hidden_gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of wi, bias and tokens, given the gradient of the pre-activations."""
    window, length = wi.shape[0], tokens.shape[1]
    block = -(-length // max(1, length // window))
    join_with_previous = functools.partial(join_previous_blocks, block=block)

    def expand_weights(wi: jax.Array) -> jax.Array:
        """Returns `expand_window_weights(wi)` with swapped axes, [block, hidden, 2 * block]."""
        return jnp.swapaxes(expand_window_weights(wi, block), 0, 1)

    # Broadcast the weights to all blocks, because XLA would copy `hidden_gradient` for a matmul with unbatched weights.
    hidden_gradient = split_blocks(hidden_gradient, block, axis=1)
    weights = jnp.broadcast_to(expand_weights(wi), (*hidden_gradient.shape[:4], 2 * block))
    same_example = True if ids is None else build_same_example_mask(ids, block)[:, :, :, None]
    product = functools.partial(jnp.einsum, preferred_element_type=_FLOAT32)
    joined_gradient = product('bntsf,bntsr->bnrf', hidden_gradient, jnp.where(same_example, weights, 0))
    # Append a token of ones; the gradient of its weight is the gradient of the bias.
    joined = jnp.pad(join_with_previous(tokens), ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=1)
    weight_gradient = product('bntsf,bnrf->bntsr', hidden_gradient, joined)
    bias_gradient = jnp.sum(weight_gradient[..., -1], axis=(0, 1, 2))
    weight_gradient = jnp.sum(jnp.where(same_example, weight_gradient[..., :-1], 0), axis=(0, 1))
    [wi_gradient] = jax.linear_transpose(expand_weights, jax.ShapeDtypeStruct(wi.shape, _FLOAT32))(weight_gradient)
    token_shape = jax.ShapeDtypeStruct(tokens.shape, _FLOAT32)
    [token_gradient] = jax.linear_transpose(join_with_previous, token_shape)(joined_gradient)
    return wi_gradient, bias_gradient, token_gradient.astype(tokens.dtype)
