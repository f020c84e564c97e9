"""Splits rows of tokens into blocks, so that the window of each token lies within two consecutive blocks."""

from typing import Any

import jax
import jax.numpy as jnp

from remixer_t5x.kernels.diagonals import spread_over_diagonals


def split_blocks(tree: Any, block: int, axis: int = 0) -> Any:
    """Splits arrays [batch, length, ...] into blocks of `block` tokens, and pads the last block with zeros.

    Inserts the block axis at `axis`; if `axis` is 0, the results are [blocks, batch, block, ...].
    """

    def split(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, 0), (0, -array.shape[1] % block), *((0, 0),) * (array.ndim - 2)))
        return jnp.moveaxis(padded.reshape(array.shape[0], -1, block, *array.shape[2:]), 1, axis)

    return jax.tree.map(split, tree)


def join_blocks(blocks: jax.Array, length: int) -> jax.Array:
    """Joins blocks [blocks, batch, block, ...] into rows [batch, length, ...], and removes the padding."""
    rows = jnp.moveaxis(blocks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]


def join_previous_blocks(array: jax.Array, block: int) -> jax.Array:
    """Splits [batch, length, ...] into blocks joined with their previous block, [batch, blocks, 2 * block, ...]."""
    here = split_blocks(array, block, axis=1)
    earlier = jnp.pad(here[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (here.ndim - 2)))
    return jnp.concatenate([earlier, here], axis=2)


def mask_same_example(ids: jax.Array, block: int) -> jax.Array:
    """Returns which tokens of the previous and the current block are in the same example as each token of the block.

    The mask is bool, [batch, blocks, block, 2 * block], for example ids [batch, length].
    """
    return split_blocks(ids, block, axis=1)[..., None] == join_previous_blocks(ids, block)[:, :, None]


def expand_window_weights(wi: jax.Array, block: int) -> jax.Array:
    """Expands the weights of a window to a matrix over the tokens of a block and of the previous block.

    Maps [window, hidden], with the current token in the last row, to [hidden, block, 2 * block], which contains the
    weights of each token of the block for the tokens of both blocks.
    """
    latest = wi[-2 * block :]
    by_distance = jnp.pad(latest.T, ((0, 0), (2 * block - len(latest), 2 * block - 1)))
    return spread_over_diagonals(by_distance, 2 * block)[:, block:]
