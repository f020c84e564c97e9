"""Keeps the chatter of libraries off the user's screen; errors still show, and `--verbose` leaves everything on."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

from remixer_t5x import lazy

# asyncio and Orbax (through absl) log tracebacks of failed writes, which the checkpoint manager reports in one line.
_REPORTED_ELSEWHERE = ('absl', 'asyncio')
_LOGGERS = ('jax', 'orbax', 'tensorflow', 'datasets', 'matplotlib')


def hush() -> None:
    """Log lines below ERROR and warnings of libraries go nowhere from here on."""
    lazy.set_environment()
    warnings.simplefilter('ignore')
    logging.basicConfig(level=logging.ERROR, format='%(name)s: %(message)s')
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _REPORTED_ELSEWHERE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Such as what TensorStore's threads report of a failed write to an event loop that is already closed.
    sys.unraisablehook = lambda unraisable: None
    logging.getLogger('remixer_t5x').setLevel(logging.WARNING)


@contextlib.contextmanager
def imports(tensorflow: bool) -> Iterator[None]:
    """While libraries are imported, what they write to file descriptor 2 is shown only when that fails.

    Args:
        tensorflow: load it first. Version 2.21 writes at any log level.
    """
    with lazy.without_stderr():
        if tensorflow:
            # Any attribute loads it.
            lazy.tf.__version__  # noqa: B018
        yield
