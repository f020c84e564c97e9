"""Iterates over tf.data datasets without autotuning.

Deleting an iterator with autotuning can block for up to a minute, because the tuning thread misses the cancellation
(TensorFlow 2.21). Without autotuning, `AUTOTUNE` selects one parallel call per thread, at most 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remixer_t5x.lazy_imports import tf


def disable_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disables autotuning for a dataset, without changing the elements or their order."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def iterate_as_numpy(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the elements of a dataset as NumPy arrays. Raises tf.errors.OpError if an element cannot be read."""
    return disable_autotune(dataset).as_numpy_iterator()
