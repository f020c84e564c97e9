"""Keeps the chatter of libraries off the user's screen; errors still show, and `--verbose` leaves everything on."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

from remixer_t5x import lazy
from remixer_t5x.errors import UserError

# Read by the C++ side of TensorFlow, gRPC and XLA when they are loaded.
_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3', 'GRPC_VERBOSITY': 'ERROR', 'GLOG_minloglevel': '3'}
# asyncio and Orbax (through absl) log tracebacks of failed writes, which the checkpoint manager reports in one line.
_REPORTED_ELSEWHERE = ('absl', 'asyncio')
_LOGGERS = ('jax', 'orbax', 'tensorflow', 'datasets', 'matplotlib')


def hush() -> None:
    """Log lines below ERROR and warnings of libraries go nowhere from here on."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter('ignore')
    logging.basicConfig(level=logging.ERROR, format='%(name)s: %(message)s')
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _REPORTED_ELSEWHERE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Such as what TensorStore's threads report of a failed write to an event loop that is already closed.
    sys.unraisablehook = lambda unraisable: None
    logging.getLogger('remixer_t5x').setLevel(logging.WARNING)
    lazy.around = _no_stderr


@contextlib.contextmanager
def imports(tensorflow: bool) -> Iterator[None]:
    """While libraries are imported, what they write to file descriptor 2 is shown only when that fails.

    Args:
        tensorflow: load it first. Version 2.21 writes at any log level.
    """
    with _no_stderr():
        if tensorflow:
            # Any attribute loads it.
            lazy.tf.__version__  # noqa: B018
        yield


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    sys.stderr.flush()
    # In memory if possible: a command needs no folder for temporary files to say that it has none.
    with open(os.memfd_create('stderr'), 'w+b') if hasattr(os, 'memfd_create') else tempfile.TemporaryFile() as kept:
        saved = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except UserError:
            raise
        except BaseException:
            os.dup2(saved, 2)
            kept.seek(0)
            with contextlib.suppress(OSError):
                os.write(2, kept.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
