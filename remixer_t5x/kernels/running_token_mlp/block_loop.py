"""Loop over blocks of tokens for the running token MLP, which stores the state A only between blocks.

A matmul computes the contribution of a block to A; the kernel module computes outputs and gradients within a block.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import batch_and_head_axes, wrap_in_shard_map
from remixer_t5x.kernels.reshaping import join_blocks, split_blocks


class TokenArrays(NamedTuple):
    """Weights and values of the tokens in whole rows or in one block."""

    w_in: jax.Array  # [batch, tokens, heads, hidden]
    value: jax.Array  # [batch, tokens, heads, features]
    w_out: jax.Array  # [batch, tokens, heads, hidden]
    # [batch, tokens] float32, 0 at the first token of an example, otherwise 1; None if rows are not packed
    keep: jax.Array | None
    scale: jax.Array | None  # [batch, tokens] float32, factor of the state A before the activation; None for 1


class BlockGradients(NamedTuple):
    """Gradients with respect to the tokens of a block and the state A before the block."""

    w_in: jax.Array
    value: jax.Array
    w_out: jax.Array
    start: jax.Array | None  # None if there is no preceding block


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mix_by_blocks(
    kernel: ModuleType,
    w_in: jax.Array,
    value: jax.Array,
    w_out: jax.Array,
    keep: jax.Array | None,
    scale: jax.Array | None,
) -> jax.Array:
    """Mixes each token with the preceding tokens of its example; w_in and value must be zero at padding.

    `kernel` is the module that computes blocks: `token_loop`, `tpu` or `unrolled`. The arrays are fields
    of `TokenArrays`.
    """
    return _forward_rule(kernel, w_in, value, w_out, keep, scale)[0]


def _forward_rule(kernel, *arrays):
    tokens = TokenArrays(*arrays)
    specs = _partition_specs(tokens)
    mixed = wrap_in_shard_map(functools.partial(_forward, kernel), (specs,), specs.value)(tokens)
    return checkpoint_name(mixed, ATTENTION_OUTPUT), tokens


def _backward_rule(kernel, tokens, gradient):
    specs = _partition_specs(tokens)
    run = wrap_in_shard_map(functools.partial(_backward, kernel), (specs, specs.value), specs[:3])
    return *run(tokens, gradient), None, None


mix_by_blocks.defvjp(_forward_rule, _backward_rule)


def _partition_specs(tokens: TokenArrays) -> TokenArrays:
    rows, heads = batch_and_head_axes(tokens.value.shape[0], tokens.value.shape[2])
    by_head, by_row = PartitionSpec(rows, None, heads, None), PartitionSpec(rows, None)
    specs = (by_head, by_head, by_head, by_row, by_row)
    return TokenArrays(*(None if array is None else spec for array, spec in zip(tokens, specs, strict=True)))


def _forward(kernel: ModuleType, tokens: TokenArrays) -> jax.Array:
    length, block = tokens.value.shape[1], kernel.block_length(tokens.w_in, tokens.value)
    if block == length:
        return kernel.forward(tokens, None)

    def mix_block(start, tokens):
        return _add_block_to_state(start, tokens), kernel.forward(tokens, start)

    _, mixed = jax.lax.scan(mix_block, zero_state(tokens), split_blocks(tokens, block))
    return join_blocks(mixed, length)


def _backward(kernel: ModuleType, tokens: TokenArrays, gradient: jax.Array) -> tuple[jax.Array, ...]:
    length, block = tokens.value.shape[1], kernel.block_length(tokens.w_in, tokens.value)
    if block == length:
        return tuple(kernel.backward(tokens, None, None, gradient)[:3])

    def block_gradients(later, inputs):
        tokens, start, gradient = inputs
        *gradients, later = kernel.backward(tokens, start, later, gradient)
        return later, gradients

    zeros, blocks = zero_state(tokens), split_blocks(tokens, block)
    _, starts = jax.lax.scan(lambda start, tokens: (_add_block_to_state(start, tokens), start), zeros, blocks)
    inputs = blocks, starts, split_blocks(gradient, block)
    _, gradients = jax.lax.scan(block_gradients, zeros, inputs, reverse=True)
    return tuple(join_blocks(array, length) for array in gradients)


def zero_state(tokens: TokenArrays) -> jax.Array:
    """Returns the state A before the first token of a row, zeros [batch, heads, hidden, features]."""
    batch, _, heads, hidden = tokens.w_in.shape
    return jnp.zeros((batch, heads, hidden, tokens.value.shape[-1]), jnp.float32)


def _add_block_to_state(start: jax.Array, tokens: TokenArrays) -> jax.Array:
    """Computes the state A after a block: the sum over the tokens of the last example in the block."""
    w_in = tokens.w_in
    if tokens.keep is not None:
        keep = tokens.keep
        from_start = jnp.cumprod(keep[:, ::-1], axis=1)[:, ::-1]  # 1 if no example starts at this or a later token
        is_added = jnp.concatenate([from_start[:, 1:], jnp.ones_like(keep[:, :1])], axis=1)
        w_in = w_in * is_added[..., None, None].astype(w_in.dtype)
        start = start * from_start[:, 0, None, None, None]
    return start + jnp.einsum(
        'bthk,bthf->bhkf', w_in, tokens.value, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )
