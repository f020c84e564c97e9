"""Weights as 8-bit integers against the definition, element by element."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.export import int8


@pytest.mark.quick
@given(st.integers(0, 2**32 - 1), st.sampled_from(['kernel', 'embedding']), st.floats(1e-6, 1e6))
def test_no_element_moves_by_more_than_half_a_step_of_its_channel(seed, name, size):
    array = size * np.random.default_rng(seed).standard_t(2, (2, 24, 32)).astype(np.float32)
    array[0, 3], array[1, :, 5] = 0, 0
    quantized = int8.quantized({f'a/{name}': array})
    axis = -2 if name == 'kernel' else -1
    step = np.abs(array).max(axis=axis, keepdims=True) / 127
    assert quantized[f'a/{name}'].dtype == np.int8 and quantized[f'a/{name}.scale'].shape == step.shape
    found = np.asarray(int8.expanded(quantized)['a'][name])
    assert (np.abs(found - array) <= step * 0.501).all()
    largest = np.abs(array).argmax(axis=axis)
    kept = (np.take_along_axis(values, np.expand_dims(largest, axis), axis) for values in (found, array))
    np.testing.assert_allclose(*kept, rtol=1e-6)


def test_vectors_small_arrays_and_matrices_along_positions_stay():
    weights = {'norm/scale': np.ones(2048), 'small/kernel': np.ones((4, 4)), 'remixer/H': np.ones((64, 64))}
    assert int8.quantized(weights) == weights
