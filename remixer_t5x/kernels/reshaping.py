"""Uses reshaping to split rows of tokens into blocks, build matrices with constant diagonals, and gather submatrices.

With blocks, the window of each token lies within two consecutive blocks. Matrices are built from padded copies, because
the gradient of an elementwise gather would be a scatter of single elements, which is slow on all devices.
"""

from typing import Any

import jax
import jax.numpy as jnp


def build_toeplitz_matrices(values: jax.Array, length: int) -> jax.Array:
    """Builds a Toeplitz matrix for each head: `out[:, i, j] = values[:, j - i + length - 1]`.

    Maps [heads, 2 * length - 1] to [heads, length, length]. One padded copy of the values per row is flattened and
    reshaped to rows that are one element shorter, which shifts each row by one element relative to the previous row.
    """
    heads, count = values.shape
    padded = jnp.pad(values, ((0, 0), (0, 1)))  # [heads, 2 * length]
    flat = jnp.broadcast_to(padded[:, None], (heads, length, count + 1)).reshape(heads, -1)
    skewed = flat[:, : length * count].reshape(heads, length, count)
    return skewed[:, :, length - 1 :]


def gather_by_positions(matrix: jax.Array, positions: jax.Array) -> jax.Array:
    """Gathers, for each pair of tokens in packed rows, the entry of `matrix` at their positions in the example.

    Returns `out[b, i, j] = matrix[positions[b, i], positions[b, j]]` for tokens i and j of the same example; the caller
    must mask all other entries. The tokens of an example must be contiguous, so `positions[b, j] - positions[b, i]`
    equals j - i, and the function gathers whole rows of a matrix indexed by this difference.

    Args:
        matrix: [length, length], indexed by positions within an example.
        positions: [batch, length] int32, the position of each token in its example.
    """
    length = matrix.shape[0]
    stride = 2 * length
    flat = jnp.pad(matrix, ((0, 0), (0, length))).reshape(-1)
    by_difference = jnp.pad(flat, (length, 0)).reshape(length, stride + 1)  # matrix[p, q] is at [p, q - p + length]
    rows = jnp.take(by_difference, positions, axis=0).reshape(positions.shape[0], -1)
    return rows[:, length:].reshape(-1, length, stride)[:, :, :length]


def split_blocks(tree: Any, block: int, axis: int = 0) -> Any:
    """Splits arrays [batch, length, ...] into blocks of `block` tokens, and pads the last block with zeros.

    Inserts the block axis at `axis`; if `axis` is 0, the results are [blocks, batch, block, ...].
    """

    def split_array(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, 0), (0, -array.shape[1] % block), *((0, 0),) * (array.ndim - 2)))
        return jnp.moveaxis(padded.reshape(array.shape[0], -1, block, *array.shape[2:]), 1, axis)

    return jax.tree.map(split_array, tree)


def join_blocks(blocks: jax.Array, length: int) -> jax.Array:
    """Joins blocks [blocks, batch, block, ...] into rows [batch, length, ...], and removes the padding."""
    rows = jnp.moveaxis(blocks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :length]


def join_previous_blocks(array: jax.Array, block: int) -> jax.Array:
    """Splits [batch, length, ...] into blocks joined with their previous block, [batch, blocks, 2 * block, ...]."""
    current = split_blocks(array, block, axis=1)
    previous = jnp.pad(current[:, :-1], ((0, 0), (1, 0), *((0, 0),) * (current.ndim - 2)))
    return jnp.concatenate([previous, current], axis=2)


def build_same_example_mask(ids: jax.Array, block: int) -> jax.Array:
    """Returns a mask of the tokens in the previous and current blocks that share an example with each current token.

    Maps example ids [batch, length] to a bool mask [batch, blocks, block, 2 * block].
    """
    return split_blocks(ids, block, axis=1)[..., None] == join_previous_blocks(ids, block)[:, :, None]


def expand_window_weights(wi: jax.Array, block: int) -> jax.Array:
    """Expands the weights of a window to a matrix over the tokens of a block and of the previous block.

    Maps [window, hidden], with the current token in the last row, to [hidden, block, 2 * block], which contains the
    weights of each token of the block for the tokens of both blocks.
    """
    latest = wi[-2 * block :]
    by_distance = jnp.pad(latest.T, ((0, 0), (2 * block - len(latest), 2 * block - 1)))
    return build_toeplitz_matrices(by_distance, 2 * block)[:, block:]
