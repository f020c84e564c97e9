"""Reads square matrices along their diagonals by reshaping padded copies.

Gathering by [query, key] would give the same result, but its gradient scatters single numbers, which is slow on every
device. The gradient of a reshape is a reshape.
"""

import jax
import jax.numpy as jnp


def spread_over_diagonals(values: jax.Array, length: int) -> jax.Array:
    """Builds a Toeplitz matrix for each head: `out[:, i, j] = values[:, j - i + length - 1]`.

    It copies the values once per query and reads the flat copy with a row stride that is one shorter.

    Args:
        values: [heads, 2 * length - 1], for relative positions -(length - 1) to length - 1.

    Returns:
        [heads, query, key].
    """
    heads, count = values.shape
    padded = jnp.pad(values, ((0, 0), (0, 1)))  # [heads, 2 * length]
    flat = jnp.broadcast_to(padded[:, None], (heads, length, count + 1)).reshape(heads, -1)
    skewed = flat[:, : length * count].reshape(heads, length, count)
    return skewed[:, :, length - 1 :]


def place_examples(matrix: jax.Array, positions: jax.Array) -> jax.Array:
    """Gathers a matrix of positions for the examples of packed rows.

    `out[b, i, j] = matrix[positions[b, i], positions[b, j]]` if i and j belong to the same example, whose tokens are
    contiguous. Other entries are arbitrary finite numbers, which the caller must mask. Within an example,
    `positions[b, j] - positions[b, i] = j - i`, so this gathers whole rows of a matrix whose second axis is that
    difference, and its gradient scatters whole rows.

    Args:
        matrix: [length, length], by positions within an example.
        positions: [batch, length] int32.

    Returns:
        [batch, length, length].
    """
    length = matrix.shape[0]
    stride = 2 * length
    flat = jnp.pad(matrix, ((0, 0), (0, length))).reshape(-1)
    by_difference = jnp.pad(flat, (length, 0)).reshape(length, stride + 1)  # matrix[p, q] is at [p, q - p + length]
    rows = jnp.take(by_difference, positions, axis=0).reshape(positions.shape[0], -1)
    return rows[:, length:].reshape(-1, length, stride)[:, :, :length]
