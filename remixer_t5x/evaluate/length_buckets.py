"""Batches of examples of similar length, in few shapes: each shape is compiled once, and padding costs time."""

import dataclasses
from collections.abc import Sequence

import numpy as np

SHORTEST = 32
# A separate shape pays off only for this many batches; compiling it takes about as long as running them.
FEWEST_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Rows:
    """One batch: the indices of its examples (at most the batch size), and the length that each is padded to."""

    examples: np.ndarray
    length: int


def bucket(length: int, longest: int) -> int:
    """The next power of two, at least SHORTEST and at most `longest`."""
    size = min(SHORTEST, longest)
    while size < min(length, longest):
        size *= 2
    return min(size, longest)


def plan(lengths: Sequence[int], batch_size: int, longest: int) -> list[Rows]:
    """Every example once, the longest first, so that a lack of memory shows at the start.

    Args:
        lengths: number of tokens of each example, at most `longest`.
        batch_size: rows of a batch; the last batch may have fewer examples.
        longest: the largest shape.
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind='stable')
    cut = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    sizes = [bucket(lengths[int(rows[0])], longest) for rows in cut]
    return [Rows(rows, size) for rows, size in zip(cut, _merged(sizes), strict=True)]


def _merged(sizes: Sequence[int]) -> list[int]:
    """`sizes` of batches, descending; a size of few batches is raised to the next larger size."""
    larger: dict[int, int] = {}
    counts = {size: sizes.count(size) for size in sorted(set(sizes))}
    kinds = list(counts)
    for size, above in zip(kinds, kinds[1:], strict=False):
        if counts[size] < FEWEST_BATCHES:
            larger[size] = above
            counts[above] += counts[size]
    raised = []
    for size in sizes:
        while size in larger:
            size = larger[size]
        raised.append(size)
    return raised
