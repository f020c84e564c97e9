"""Builds matrices with constant diagonals and gathers submatrices by reshaping padded copies.

Gathering single elements by [query, key] would return the same result, but the gradient of this gather is a scatter of
single elements, which is slow on all devices. The gradient of a reshape is only another reshape.
"""

import jax
import jax.numpy as jnp


def spread_over_diagonals(values: jax.Array, length: int) -> jax.Array:
    """Builds a Toeplitz matrix for each head: `out[:, i, j] = values[:, j - i + length - 1]`.

    The values are copied once per query, and the flattened copies are reshaped to rows that are one element shorter,
    which shifts each row by one.

    Args:
        values: [heads, 2 * length - 1], for relative positions -(length - 1) to length - 1.
        length: number of queries and keys.

    Returns:
        [heads, query, key].
    """
    heads, count = values.shape
    padded = jnp.pad(values, ((0, 0), (0, 1)))  # [heads, 2 * length]
    flat = jnp.broadcast_to(padded[:, None], (heads, length, count + 1)).reshape(heads, -1)
    skewed = flat[:, : length * count].reshape(heads, length, count)
    return skewed[:, :, length - 1 :]


def gather_by_positions(matrix: jax.Array, positions: jax.Array) -> jax.Array:
    """Gathers the entries of a matrix indexed by positions for the examples of packed rows.

    Returns `out[b, i, j] = matrix[positions[b, i], positions[b, j]]` if i and j belong to the same example, whose
    tokens must be contiguous. All other entries are arbitrary finite numbers, which the caller must mask. Within an
    example, `positions[b, j] - positions[b, i] = j - i`, so whole rows of a matrix indexed by this difference are
    gathered, and the gradient scatters whole rows.

    Args:
        matrix: [length, length], indexed by positions within an example.
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
