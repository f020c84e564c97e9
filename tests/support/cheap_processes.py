"""Settings that make a process of tests cheaper, for pytest's own and for those that tests fork."""

import gc
import sys


def after_imports() -> None:
    """Call it once the libraries are imported.

    What was imported stays until the end: collections of garbage do not look through it again, and a forked process
    need not copy its pages. And they are rare: Python's usual ones, one for each 700 new objects, are a twentieth of
    the time of a run.

    TensorFlow does not improve the graphs of datasets, which takes longer than tests read from them.
    """
    if 'tensorflow' in sys.modules:
        sys.modules['tensorflow'].config.optimizer.set_experimental_options({'disable_meta_optimizer': True})
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
