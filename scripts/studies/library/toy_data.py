"""Generates HyperMixer's toy task (Mai et al. 2023, section 4.7 and appendix B.4, based on a lecture by Fleuret, 2019).

A row contains two rectangles and two triangles of different heights. In the target, both shapes of a kind have the mean
of their two heights, so the prediction for each token depends on the height of the other shape of the same kind.

The paper does not specify lengths or ranges. We use heights from 1 to 25, widths of 5, 7, 9 or 11 tokens (odd, so that
a triangle has a tip), at least one empty token between shapes, and uniformly distributed placements.
"""

import numpy as np

HEIGHTS = 1.0, 25.0
WIDTHS = np.array([5, 7, 9, 11])
NUM_SHAPES = 4
# Minimum length of a row: four shapes of maximum width with one token between them.
SHORTEST = NUM_SHAPES * int(WIDTHS.max()) + NUM_SHAPES - 1


def generate_examples(rng: np.random.Generator, count: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns inputs, targets, and the best guess from each shape's height alone: float32 [count, length] each.

    The guess assumes that the other shape of the same kind has the mean of all heights. The error of this guess is the
    lowest possible error of a model without token mixing whose receptive field contains no other shape.

    Raises:
        ValueError: `length` is less than `SHORTEST`.
    """
    if length < SHORTEST:
        raise ValueError(f'a row needs {SHORTEST} tokens to hold any four shapes, got {length}: use a longer one')
    is_triangle = rng.permuted(np.tile([False, False, True, True], (count, 1)), axis=1)
    widths = rng.choice(WIDTHS, (count, NUM_SHAPES))
    heights = rng.uniform(*HEIGHTS, (count, NUM_SHAPES))
    profiles = _draw_unit_shapes(rng, widths, is_triangle, length)
    # Indices of the other shape of the same kind, [count, shapes].
    partner = ((is_triangle[:, :, None] == is_triangle[:, None]) & ~np.eye(NUM_SHAPES, dtype=bool)).argmax(axis=2)
    means = (heights + np.take_along_axis(heights, partner, axis=1)) / 2
    guesses = (heights + np.mean(HEIGHTS)) / 2
    inputs, targets, local = (np.einsum('ns,nsl->nl', which, profiles) for which in (heights, means, guesses))
    return inputs.astype(np.float32), targets.astype(np.float32), local.astype(np.float32)


def _draw_unit_shapes(rng: np.random.Generator, widths: np.ndarray, is_triangle: np.ndarray, length: int) -> np.ndarray:
    """Draws shapes of height 1 at random positions; returns one row per shape, [count, shapes, length]."""
    room = length - widths.sum(axis=1) - (NUM_SHAPES - 1)
    # If each shape and the free token after it are shrunk to one token, any four distinct tokens are a valid placement.
    keys = rng.random((len(widths), length))
    keys[np.arange(length) >= (room + NUM_SHAPES)[:, None]] = np.inf
    chosen = np.sort(np.argpartition(keys, NUM_SHAPES, axis=1)[:, :NUM_SHAPES], axis=1)
    before = np.cumsum(widths, axis=1) - widths
    starts = chosen + before
    offset = np.arange(length) - starts[..., None]
    width = widths[..., None]
    triangle = 1 - np.abs(2 * offset - (width - 1)) / (width + 1)
    return np.where((offset >= 0) & (offset < width), np.where(is_triangle[..., None], triangle, 1.0), 0.0)
