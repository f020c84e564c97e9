"""The MLP along windows of tokens (`mlp_mixer.WindowMixer`) by a kernel that holds the hidden units on the chip.

    y_t[d] = sum_s out[s] gelu(sum_j wi[j, s] x[t - w + 1 + j, d] + bias[s])

A block of tokens reads itself and the block before it, so that its windows are never written: for one hidden unit the
sum over j is a product with two matrices [BLOCK, BLOCK] that have wi[:, s] along their diagonals. The zeros in them
double the products. The backward pass computes hidden units again from the tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from remixer_t5x.models.layers.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.models.layers.diagonals import spread_over_diagonals
from remixer_t5x.models.layers.each_device import on_each_device, rows_and_heads

# Tokens of a block, and the most by which a window reaches back.
BLOCK = 32


class Operands(NamedTuple):
    """What a kernel reads.

    Attributes:
        tokens: [batch, length, features], zero at padding; the length is a multiple of BLOCK.
        before, own: [hidden, BLOCK, BLOCK] in tokens' dtype, the weight of each token of the block before, and of the
            block itself, for each token of the block.
        bias: [hidden] float32.
        out: [batch, hidden] float32.
        ids: [batch, length] int32, the example of each token in packed rows; None where a row is one example.
    """

    tokens: Any
    before: Any
    own: Any
    bias: Any
    out: Any
    ids: Any


class Gradients(NamedTuple):
    """Gradients of the first five operands; those of `before`, `own` and `bias` in parts, along a leading axis."""

    tokens: Any
    before: Any
    own: Any
    bias: Any
    out: Any


class Kernel(NamedTuple):
    """The functions of a kernel: `forward(operands)` and `backward(operands, gradient)`, which returns `Gradients`."""

    forward: Callable
    backward: Callable


def mix(
    kernel: Kernel, wi: jax.Array, bias: jax.Array, out: jax.Array, tokens: jax.Array, ids: jax.Array | None
) -> jax.Array:
    """Computes the equation above for all tokens.

    Args:
        kernel: the functions of a kernel.
        wi: [window, hidden], a window of at most BLOCK + 1; the last row is a token's own.
        bias: [hidden].
        out: [batch, hidden].
        tokens, ids: as in `Operands`, of any length.

    Returns:
        [batch, length, features] in tokens' dtype; hidden units are float32.
    """
    length = tokens.shape[1]
    fill = ((0, 0), (0, -length % BLOCK))
    tokens = jnp.pad(tokens, (*fill, (0, 0)))
    ids = None if ids is None else jnp.pad(ids, fill)
    before, own = _by_place(wi.astype(tokens.dtype))
    out, bias = out.astype(jnp.float32), bias.astype(jnp.float32)
    return _mix(kernel, Operands(tokens, before, own, bias, out, ids))[:, :length]


def _by_place(wi: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`before` and `own`."""
    window, _ = wi.shape
    by_distance = jnp.pad(wi.T, ((0, 0), (2 * BLOCK - window, 2 * BLOCK - 1)))
    rows = spread_over_diagonals(by_distance, 2 * BLOCK)[:, BLOCK:]
    return rows[:, :, :BLOCK], rows[:, :, BLOCK:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(kernel: Kernel, operands: Operands) -> jax.Array:
    return _mix_and_keep(kernel, operands)[0]


def _mix_and_keep(kernel, operands):
    specs, _ = _specs(operands)
    mixed = on_each_device(kernel.forward, (specs,), specs.tokens)(operands)
    return checkpoint_name(mixed, ATTENTION_OUTPUT), operands


def _gradients(kernel, operands, gradient):
    specs, parts = _specs(operands)
    found = on_each_device(kernel.backward, (specs, specs.tokens), parts)(operands, gradient)
    before, own, bias = (
        jnp.sum(array, axis=0).astype(like.dtype) for array, like in zip(found[1:4], operands[1:4], strict=True)
    )
    return (Operands(found.tokens, before, own, bias, found.out, None),)


_mix.defvjp(_mix_and_keep, _gradients)


def gradient_of_tokens(before: jax.Array, own: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[batch, length, features]: what each block says of the tokens before it and of its own, added up.

    The gradient of the block before a block belongs to the tokens there; before the first block there are none.
    """
    earlier = jnp.pad(before[:, BLOCK:], ((0, 0), (0, BLOCK), (0, 0)))
    return (earlier + own).astype(dtype)


def _specs(operands: Operands) -> tuple[Operands, Gradients]:
    """How operands and gradients are split: rows of the batch."""
    rows, _ = rows_and_heads(operands.tokens.shape[0], 1)
    by_row, whole = PartitionSpec(rows), PartitionSpec()
    ids = None if operands.ids is None else by_row
    return Operands(by_row, whole, whole, whole, by_row, ids), Gradients(by_row, by_row, by_row, by_row, by_row)
