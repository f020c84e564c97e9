"""Square matrices read along their diagonals, by reshapes of padded copies.

A [query, key] gather would compute the same, but its gradient is a scatter of single numbers, which is slow on every
device. The gradient of a reshape is a reshape.
"""

import jax
import jax.numpy as jnp


def spread_over_diagonals(values: jax.Array, length: int) -> jax.Array:
    """[heads, 2 * length - 1] values of relative positions -(length-1)..length-1 -> [heads, query, key].

    `out[:, i, j] = values[:, j - i + length - 1]`, by copying the values once per query and reading the flat copy with
    a row stride one shorter.
    """
    heads, count = values.shape
    padded = jnp.pad(values, ((0, 0), (0, 1)))  # [heads, 2 * length]
    flat = jnp.broadcast_to(padded[:, None], (heads, length, count + 1)).reshape(heads, -1)
    skewed = flat[:, : length * count].reshape(heads, length, count)
    return skewed[:, :, length - 1 :]


def place_examples(matrix: jax.Array, positions: jax.Array) -> jax.Array:
    """[length, length] by positions in an example -> [batch, length, length] by places in packed rows.

    `out[b, i, j] = matrix[positions[b, i], positions[b, j]]` if i and j belong to one example, whose tokens are next to
    each other in order; arbitrary finite numbers elsewhere, which the caller masks. Within an example `positions[b, j]
    - positions[b, i] = j - i`: whole rows are gathered from a matrix whose second axis is that difference, and their
    gradient is added up row by row.
    """
    length = matrix.shape[0]
    stride = 2 * length
    flat = jnp.pad(matrix, ((0, 0), (0, length))).reshape(-1)
    by_difference = jnp.pad(flat, (length, 0)).reshape(length, stride + 1)  # matrix[p, q] is at [p, q - p + length]
    rows = jnp.take(by_difference, positions, axis=0).reshape(positions.shape[0], -1)
    return rows[:, length:].reshape(-1, length, stride)[:, :, :length]
