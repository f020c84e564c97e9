"""Hides log lines and warnings of libraries, but not errors; `--verbose` shows everything."""

from __future__ import annotations

import logging
import sys
import warnings

from remixer_t5x import lazy

# asyncio and Orbax (through absl) log tracebacks of failed writes, which the checkpoint manager reports in one line.
_REPORTED_ELSEWHERE = ('absl', 'asyncio')
_LOGGERS = ('jax', 'orbax', 'tensorflow', 'datasets', 'matplotlib')


def hush() -> None:
    """Hides warnings and log lines below ERROR of libraries from now on."""
    lazy.set_environment()
    warnings.simplefilter('ignore')
    logging.basicConfig(level=logging.ERROR, format='%(name)s: %(message)s')
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _REPORTED_ELSEWHERE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # TensorStore's threads report failed writes to an event loop that is already closed.
    sys.unraisablehook = lambda unraisable: None
    logging.getLogger('remixer_t5x').setLevel(logging.WARNING)
