"""Reduces the overhead of Python, TensorFlow and the disk in the test processes."""

import gc
import os
import sys


def configure_after_imports() -> None:
    """Makes garbage collection rare, and disables TensorFlow's graph optimizer and fsync. Call it after all imports.

    Imported objects are excluded from garbage collection, so forked processes share their memory pages. With Python's
    default thresholds (a collection for every 700 new objects), garbage collection takes 5% of the time of a test run.
    """
    if 'tensorflow' in sys.modules:
        # Optimizing the graph of a dataset takes longer than reading the few examples of a test.
        sys.modules['tensorflow'].config.optimizer.set_experimental_options({'disable_meta_optimizer': True})
    # Tests kill processes but not the machine, so data need not reach the disk.
    os.fsync = lambda descriptor: None
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
