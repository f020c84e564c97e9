"""The order of training examples."""

from collections.abc import Iterator

import numpy as np


def batches(rng: np.random.Generator, examples: int, batch: int) -> Iterator[np.ndarray]:
    """Yields the indices of batches, epoch by epoch; a batch repeats examples if there are fewer than its size."""
    waiting: np.ndarray = np.empty(0, np.int64)
    while True:
        while len(waiting) < batch:
            waiting = np.concatenate([waiting, rng.permutation(examples)])
        yield waiting[:batch]
        waiting = waiting[batch:]
