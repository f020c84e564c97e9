"""Diagonal layouts against the loops in their docstrings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.kernels import diagonals


@pytest.mark.parametrize('length', [1, 5])
def test_values_are_spread_along_diagonals(length):
    values = np.random.default_rng(0).normal(size=(3, 2 * length - 1)).astype(np.float32)
    expected = np.empty((3, length, length), np.float32)
    for i in range(length):
        for j in range(length):
            expected[:, i, j] = values[:, j - i + length - 1]
    np.testing.assert_array_equal(diagonals.spread_over_diagonals(jnp.asarray(values), length), expected)


@pytest.mark.parametrize('examples', [[[9]], [[4, 5], [1, 8]], [[2, 3, 1], [5, 2]]])
def test_a_matrix_is_placed_at_each_example_with_gradients(examples):
    length = 9
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=(length, length)).astype(np.float32)
    weights = rng.normal(size=(len(examples), length, length)).astype(np.float32)
    positions = np.zeros((len(examples), length), np.int32)
    same = np.zeros((len(examples), length, length), bool)
    expected, expected_gradient = np.zeros_like(weights), np.zeros_like(matrix)
    for row, lengths in enumerate(examples):
        start = 0
        for n in lengths:
            example = slice(start, start + n)
            positions[row, example] = np.arange(n)
            same[row, example, example] = True
            expected[row, example, example] = matrix[:n, :n]
            expected_gradient[:n, :n] += weights[row, example, example]
            start += n

    def placed(matrix):
        return jnp.where(same, diagonals.gather_by_positions(matrix, positions), 0.0)

    actual, pull_back = jax.vjp(placed, jnp.asarray(matrix))
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_allclose(pull_back(jnp.asarray(weights))[0], expected_gradient, rtol=1e-5, atol=1e-6)
