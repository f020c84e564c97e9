"""`mix` using a kernel that keeps A on the chip while it processes the tokens of a block.

Between blocks A is in the device's memory: A before each block is a sum of matmuls, which the backward pass computes
again. Rows as short as a block, such as T5's targets, never have A in memory at all.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import on_each_device, rows_and_heads

Activation = Callable[[jax.Array], jax.Array]


class Tokens(NamedTuple):
    """What a kernel reads of the tokens of a block; `None` for what a call does not have.

    Attributes:
        w_in, w_out: [batch, tokens, heads, hidden].
        value: [batch, tokens, heads, features].
        keep: [batch, tokens] float32, 0 where an example starts and A with it, otherwise 1.
        scale: [batch, tokens] float32, what A is multiplied by before the activation.
    """

    w_in: jax.Array
    value: jax.Array
    w_out: jax.Array
    keep: jax.Array | None
    scale: jax.Array | None


class BlockGradients(NamedTuple):
    """Gradients of the arrays of the same name, and of A before the block, None where that is zero."""

    w_in: jax.Array
    value: jax.Array
    w_out: jax.Array
    start: jax.Array | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mix_by_kernel(
    kernel: ModuleType,
    activation: Activation,
    w_in: jax.Array,
    value: jax.Array,
    w_out: jax.Array,
    keep: jax.Array | None,
    scale: jax.Array | None,
) -> jax.Array:
    """`mix.mix_through_running_hidden` of arguments that are zero at padding.

    Args:
        kernel: a module with `forward`, `backward` and `block_length`, as `tpu`.
        activation: elementwise function of the hidden units.
        w_in, value, w_out, keep, scale: as in `Tokens`, of whole rows.

    Returns:
        [batch, length, heads, features] in value's dtype.
    """
    return _mix_and_keep(kernel, activation, w_in, value, w_out, keep, scale)[0]


def _mix_and_keep(kernel, activation, *arrays):
    tokens = Tokens(*arrays)
    specs = _specs(tokens)
    mixed = on_each_device(functools.partial(_forward, kernel, activation), (specs,), specs.value)(tokens)
    return checkpoint_name(mixed, ATTENTION_OUTPUT), tokens


def _gradients(kernel, activation, tokens, gradient):
    specs = _specs(tokens)
    run = on_each_device(functools.partial(_backward, kernel, activation), (specs, specs.value), specs[:3])
    return *run(tokens, gradient), None, None


mix_by_kernel.defvjp(_mix_and_keep, _gradients)


def _specs(tokens: Tokens) -> Tokens:
    rows, heads = rows_and_heads(tokens.value.shape[0], tokens.value.shape[2])
    by_head, by_row = PartitionSpec(rows, None, heads, None), PartitionSpec(rows, None)
    specs = (by_head, by_head, by_head, by_row, by_row)
    return Tokens(*(None if array is None else spec for array, spec in zip(tokens, specs, strict=True)))


def _forward(kernel: ModuleType, activation: Activation, tokens: Tokens) -> jax.Array:
    length, block = tokens.value.shape[1], kernel.block_length(tokens.w_in, tokens.value)
    if block == length:
        return kernel.forward(activation, tokens, None)

    def mix_block(start, tokens):
        return _add_block(start, tokens), kernel.forward(activation, tokens, start)

    _, mixed = jax.lax.scan(mix_block, _no_sum(tokens), _split(tokens, block))
    return _join(mixed, length)


def _backward(kernel: ModuleType, activation: Activation, tokens: Tokens, gradient: jax.Array) -> tuple[jax.Array, ...]:
    length, block = tokens.value.shape[1], kernel.block_length(tokens.w_in, tokens.value)
    if block == length:
        return tuple(kernel.backward(activation, tokens, None, None, gradient)[:3])

    def block_gradients(later, block):
        tokens, start, gradient = block
        *gradients, later = kernel.backward(activation, tokens, start, later, gradient)
        return later, gradients

    zeros, blocks = _no_sum(tokens), _split(tokens, block)
    _, starts = jax.lax.scan(lambda start, tokens: (_add_block(start, tokens), start), zeros, blocks)
    _, gradients = jax.lax.scan(block_gradients, zeros, (blocks, starts, _split(gradient, block)), reverse=True)
    return tuple(_join(array, length) for array in gradients)


def _no_sum(tokens: Tokens) -> jax.Array:
    """A of no tokens, [batch, heads, hidden, features]."""
    batch, _, heads, hidden = tokens.w_in.shape
    return jnp.zeros((batch, heads, hidden, tokens.value.shape[-1]), jnp.float32)


def _add_block(start: jax.Array, tokens: Tokens) -> jax.Array:
    """A after the block: a sum over the tokens after the last start of an example in it."""
    w_in = tokens.w_in
    if tokens.keep is not None:
        keep = tokens.keep
        from_start = jnp.cumprod(keep[:, ::-1], axis=1)[:, ::-1]  # 1 if no example starts at this token or later
        is_added = jnp.concatenate([from_start[:, 1:], jnp.ones_like(keep[:, :1])], axis=1)
        w_in = w_in * is_added[..., None, None].astype(w_in.dtype)
        start = start * from_start[:, 0, None, None, None]
    return start + jnp.einsum(
        'bthk,bthf->bhkf', w_in, tokens.value, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )


def _split(tree: Any, block: int) -> Any:
    """[batch, length, ...] -> [blocks, batch, block, ...], filled up with zeros."""

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, 0), (0, -array.shape[1] % block), *((0, 0),) * (array.ndim - 2)))
        return jnp.moveaxis(padded.reshape(array.shape[0], -1, block, *array.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)


def _join(blocks: jax.Array, length: int) -> jax.Array:
    """[blocks, batch, block, ...] -> [batch, length, ...]."""
    rows = jnp.moveaxis(blocks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]
