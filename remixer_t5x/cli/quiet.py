"""Keeps the chatter of libraries off the user's screen; errors still show, and `--verbose` leaves everything on."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator

from remixer_t5x.errors import UserError

# Read by the C++ side of TensorFlow, gRPC and XLA when they are loaded.
_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3', 'GRPC_VERBOSITY': 'ERROR', 'GLOG_minloglevel': '3'}
_LOGGERS = ('absl', 'jax', 'orbax', 'tensorflow', 'datasets', 'matplotlib')


def hush() -> None:
    """Log lines below ERROR and warnings of libraries go nowhere from here on."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter('ignore')
    logging.basicConfig(level=logging.ERROR, format='%(name)s: %(message)s')
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def imports(tensorflow: bool) -> Iterator[None]:
    """While libraries are imported, what they write to file descriptor 2 is shown only when that fails.

    Args:
        tensorflow: load it first and hide accelerators from it, which are JAX's. Version 2.21 writes at any log level.
    """
    with _no_stderr():
        if tensorflow:
            config = importlib.import_module('tensorflow').config
            for kind in ('GPU', 'TPU'):
                config.set_visible_devices([], kind)
        yield


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        saved = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except UserError:
            raise
        except BaseException:
            os.dup2(saved, 2)
            kept.seek(0)
            os.write(2, kept.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)
