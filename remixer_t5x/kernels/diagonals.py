"""Builds matrices with constant diagonals and gathers submatrices by reshaping padded copies.

The gradient of an element-wise gather would be a scatter of single elements, which is slow on all devices.
"""

import jax
import jax.numpy as jnp


def spread_over_diagonals(values: jax.Array, length: int) -> jax.Array:
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
