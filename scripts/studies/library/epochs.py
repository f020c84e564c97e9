"""Draws batches of training examples in random order."""

from collections.abc import Iterator

import numpy as np


def batches(rng: np.random.Generator, examples: int, batch: int) -> Iterator[np.ndarray]:
    """Yields the example indices of batches for successive epochs; a batch repeats examples if there are too few."""
    waiting: np.ndarray = np.empty(0, np.int64)
    while True:
        while len(waiting) < batch:
            waiting = np.concatenate([waiting, rng.permutation(examples)])
        yield waiting[:batch]
        waiting = waiting[batch:]
