"""Relative position buckets against Hugging Face's recorded and live values."""

import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.models.layers import positions
from tests.support import references

# Buckets of distances 0, 1, 7, 8, 15, 16, 31, 32, 64, 127, 128, 500 as transformers 5.23.0's T5Attention computes them.
DISTANCES = [0, 1, 7, 8, 15, 16, 31, 32, 64, 127, 128, 500]
BEHIND = {True: [0, 1, 7, 8, 9, 10, 11, 12, 14, 15, 15, 15], False: [0, 1, 7, 8, 15, 16, 21, 21, 26, 31, 31, 31]}


@pytest.mark.parametrize('bidirectional', [True, False])
def test_recorded_buckets(bidirectional):
    behind = positions.relative_position_bucket(-jnp.asarray(DISTANCES), bidirectional=bidirectional)
    np.testing.assert_array_equal(behind, BEHIND[bidirectional])
    ahead = positions.relative_position_bucket(jnp.asarray(DISTANCES[1:]), bidirectional=bidirectional)
    np.testing.assert_array_equal(ahead, np.add(BEHIND[True][1:], 16) if bidirectional else 0)


@pytest.mark.parametrize('bidirectional', [True, False])
def test_buckets_equal_hugging_face_live(bidirectional):
    references.need('torch', 'transformers')
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    relative = np.arange(-600, 600)
    wanted = T5Attention._relative_position_bucket(torch.from_numpy(relative), bidirectional=bidirectional)
    actual = positions.relative_position_bucket(jnp.asarray(relative), bidirectional=bidirectional)
    np.testing.assert_array_equal(actual, wanted.numpy())
