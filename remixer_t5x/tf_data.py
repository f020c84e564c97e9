"""Reads tf.data without autotuning.

Deleting an iterator that autotunes may block for up to a minute: its tuning thread wakes, checks for cancellation too
early (TensorFlow 2.21), and sleeps again. Without autotuning, `AUTOTUNE` is one parallel call per thread, at most 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remixer_t5x.lazy import tf


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disables autotuning; the elements and their order stay the same."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def numpy_iterator(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the elements as NumPy arrays. Raises tf.errors.OpError if they cannot be read."""
    return without_autotune(dataset).as_numpy_iterator()
