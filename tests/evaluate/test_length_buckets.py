"""Batches of like length: every example once, nothing cut, few shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.evaluate import length_buckets


@given(st.lists(st.integers(0, 512), max_size=300), st.integers(1, 40), st.sampled_from([512, 600, 1024]))
def test_every_example_is_in_one_batch_that_holds_it(lengths, batch_size, longest):
    batches = length_buckets.plan(lengths, batch_size, longest)
    assert sorted(row for rows in batches for row in rows.examples) == list(range(len(lengths)))
    for rows in batches:
        assert 1 <= len(rows.examples) <= batch_size
        assert max(lengths[row] for row in rows.examples) <= rows.length <= longest
    # Only the last one is not full, and none but the longest shape is made for a few batches.
    assert all(len(rows.examples) == batch_size for rows in batches[:-1])
    sizes = [rows.length for rows in batches]
    for size in set(sizes) - {max(sizes, default=0)}:
        assert sizes.count(size) >= length_buckets.FEWEST_BATCHES


def test_short_examples_get_short_rows():
    lengths = [20] * 64 + [100] * 64 + [300] * 64
    sizes = [rows.length for rows in length_buckets.plan(lengths, 8, 512)]
    assert sizes == [512] * 8 + [128] * 8 + [32] * 8


@pytest.mark.parametrize(
    ('length', 'longest', 'size'),
    [(1, 512, 32), (32, 512, 32), (33, 512, 64), (500, 512, 512), (40, 48, 48), (3, 16, 16), (0, 512, 32)],
)
def test_sizes(length, longest, size):
    assert length_buckets.bucket(length, longest) == size


def test_no_examples_make_no_batch():
    assert length_buckets.plan(np.zeros(0, int), 8, 32) == []
