"""The order in which a study goes through its examples."""

from collections.abc import Iterator

import numpy as np


def batches(rng: np.random.Generator, examples: int, batch: int) -> Iterator[np.ndarray]:
    """Indices of one batch after the other, epoch by epoch; with fewer examples than a batch they repeat in it."""
    waiting: np.ndarray = np.empty(0, np.int64)
    while True:
        while len(waiting) < batch:
            waiting = np.concatenate([waiting, rng.permutation(examples)])
        yield waiting[:batch]
        waiting = waiting[batch:]
