"""The equation of `tpu` on a GPU, in operations that XLA fuses so that hidden units stay in registers.

The forward pass and the gradients of `out` and `bias` are one kernel each, which computes hidden units from the tokens.
The backward pass writes one array of their size: their gradient in the dtype of the tokens, [batch, blocks,
block * hidden, features], which two matmuls read. Blocks are at least as long as a window reaches back, so that the
window of a token is within its block and the previous block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.diagonals import spread_over_diagonals
from remixer_t5x.kernels.gelu import recomputed, sigmoid_form, sigmoid_form_and_slope

_FLOAT32 = jnp.float32
# The program has a product for each token of a window.
_LONGEST_WINDOW = 64


def refusal(wi: jax.Array, tokens: jax.Array) -> str | None:
    """Returns why this does not support a call, or None."""
    return f'takes windows of at most {_LONGEST_WINDOW} tokens' if wi.shape[0] > _LONGEST_WINDOW else None


@jax.custom_vjp
def mix(wi: jax.Array, bias: jax.Array, out: jax.Array, tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Computes `tpu.mix`."""
    return _forward_rule(wi, bias, out, tokens, ids)[0]


def _forward_rule(*operands: Any) -> tuple[jax.Array, Any]:
    wi, bias, out, tokens, ids = operands
    units = sigmoid_form(_hidden(wi, bias, tokens, ids))
    mixed = jnp.sum(_over_tokens(out) * units, axis=2).astype(tokens.dtype)
    return checkpoint_name(mixed, ATTENTION_OUTPUT), operands


def _backward_rule(operands: Any, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    wi, bias, out, tokens, ids = operands
    of_result = gradient.astype(_FLOAT32)[:, :, None]
    # XLA would write hidden units that two kernels need, if it saw that they are equal.
    units = sigmoid_form(_hidden(recomputed(wi.astype(_FLOAT32), 1), bias, tokens, ids))
    of_out = jnp.sum(units * of_result, axis=(1, 3))
    _, slope = sigmoid_form_and_slope(_hidden(recomputed(wi.astype(_FLOAT32), 2), bias, tokens, ids))
    of_units = (_over_tokens(out) * slope * of_result).astype(tokens.dtype)
    of_wi, of_bias, of_tokens = _product_gradients(wi, tokens, ids, of_units)
    return of_wi.astype(wi.dtype), of_bias.astype(bias.dtype), of_out.astype(out.dtype), of_tokens, None


mix.defvjp(_forward_rule, _backward_rule)


def _over_tokens(out: jax.Array) -> jax.Array:
    return out.astype(_FLOAT32)[:, None, :, None]


def _hidden(wi: jax.Array, bias: jax.Array, tokens: jax.Array, ids: jax.Array | None) -> jax.Array:
    """[batch, length, hidden, features] float32, before the activation."""
    window, length = wi.shape[0], tokens.shape[1]
    reach = jnp.pad(tokens, ((0, 0), (window - 1, 0), (0, 0)))
    ids_of_reach = None if ids is None else jnp.pad(ids, ((0, 0), (window - 1, 0)))
    total = bias.astype(_FLOAT32)[:, None]
    for place in range(window):
        seen = reach[:, place : place + length]
        if ids_of_reach is not None:
            seen = jnp.where((ids_of_reach[:, place : place + length] == ids)[..., None], seen, 0)
        total = total + wi[place].astype(_FLOAT32)[:, None] * seen.astype(_FLOAT32)[:, :, None]
    return total


def _product_gradients(
    wi: jax.Array, tokens: jax.Array, ids: jax.Array | None, of_units: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of wi, bias and tokens, given the gradient of the hidden units before the activation."""
    (window, hidden), (batch, length, _) = wi.shape, tokens.shape
    blocks = max(1, length // window)
    block = -(-length // blocks)

    def split(array: jax.Array) -> jax.Array:
        """[batch, length, ...] -> [batch, blocks, block, ...], padded with zeros."""
        rest = array.shape[2:]
        padded = jnp.pad(array, ((0, 0), (0, blocks * block - length), *((0, 0),) * len(rest)))
        return padded.reshape(batch, blocks, block, *rest)

    def reach(array: jax.Array) -> jax.Array:
        """[batch, blocks, 2 * block, ...]: the block before each block, and the block itself."""
        here = split(array)
        return jnp.concatenate([jnp.pad(here, ((0, 0), (1, 0), *((0, 0),) * (here.ndim - 2)))[:, :-1], here], axis=2)

    def by_place(wi: jax.Array) -> jax.Array:
        """[block, hidden, 2 * block]: for each token of a block the weights of the tokens that it can reach."""
        latest = wi[-block:]
        by_distance = jnp.pad(latest.T, ((0, 0), (2 * block - len(latest), 2 * block - 1)))
        return jnp.swapaxes(spread_over_diagonals(by_distance, 2 * block)[:, block:], 0, 1)

    # [batch, blocks, block, hidden, 2 * block]; XLA copies `of_units` for a product with the weights of all blocks.
    weights = jnp.broadcast_to(by_place(wi), (batch, blocks, block, hidden, 2 * block))
    meets = True if ids is None else (split(ids)[..., None] == reach(ids)[:, :, None])[:, :, :, None]
    of_units = split(of_units)
    product = functools.partial(jnp.einsum, preferred_element_type=_FLOAT32)
    of_reach = product('bntsf,bntsr->bnrf', of_units, jnp.where(meets, weights, 0))
    # A token of ones has the gradient of the bias.
    seen = jnp.pad(reach(tokens), ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=1)
    of_weights = product('bntsf,bnrf->bntsr', of_units, seen)
    of_bias = jnp.sum(of_weights[..., -1], axis=(0, 1, 2))
    of_weights = jnp.sum(jnp.where(meets, of_weights[..., :-1], 0), axis=(0, 1))
    [of_wi] = jax.linear_transpose(by_place, jax.ShapeDtypeStruct(wi.shape, _FLOAT32))(of_weights)
    [of_tokens] = jax.linear_transpose(reach, jax.ShapeDtypeStruct(tokens.shape, _FLOAT32))(of_reach)
    return of_wi, of_bias, of_tokens.astype(tokens.dtype)
