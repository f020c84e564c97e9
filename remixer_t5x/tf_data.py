"""Reading tf.data without autotuning.

An iterator that autotunes may wait when it is deleted, for as long as it has been read and at most a minute: the thread
that tunes is woken to end, asks whether it is cancelled before the answer is yes (TensorFlow 2.21), and sleeps again.
Without autotuning, `AUTOTUNE` is as many parallel calls as there are threads, at most 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from remixer_t5x.lazy import tf


def without_autotune(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """The same elements in the same order."""
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def arrays(dataset: tf.data.Dataset) -> Iterator[Any]:
    """The elements as NumPy arrays, by `as_numpy_iterator`. Raises tf.errors.OpError if they cannot be read."""
    return without_autotune(dataset).as_numpy_iterator()
