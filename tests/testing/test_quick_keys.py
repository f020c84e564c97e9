"""Quick keys give numbers that are random enough for parameters, and others for every key."""

import jax
import numpy as np

from remixer_t5x.testing.quick_keys import quick_key


def test_numbers_of_a_key_are_normal_and_independent():
    x = np.asarray(jax.random.normal(quick_key(3), (200, 1000)))
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01
    # Of 1000 normal numbers, a correlation of two rows is 0.03 on average; the largest of 20,000 pairs is below 0.2.
    assert np.abs(np.corrcoef(x) - np.eye(len(x))).max() < 0.2


def test_keys_made_of_a_key_give_other_numbers():
    key = quick_key(3)
    keys = [key, *jax.random.split(key, 3), *(jax.random.fold_in(key, data) for data in range(3)), quick_key(4)]
    y = np.stack([jax.random.uniform(made, (5000,)) for made in keys])
    assert np.abs(np.corrcoef(y) - np.eye(len(keys))).max() < 0.1


def test_a_seed_gives_the_same_numbers_again():
    first, second = (np.asarray(jax.random.bits(quick_key(5), (8,))) for _ in range(2))
    assert np.array_equal(first, second)
