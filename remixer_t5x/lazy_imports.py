"""Imports TensorFlow and seqio at their first use.

    from remixer_t5x.lazy_imports import seqio, tf

Only tasks require these libraries. Inference-only installations lack these libraries, and importing them takes longer
than all other imports combined. Modules that use these libraries require `from __future__ import annotations`, because
evaluating annotations would import the libraries. Subclasses of the libraries' classes are defined in separate modules,
which are imported only when they are needed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from remixer_t5x.errors import UserError

# Libraries that only tasks require, and the command that installs them.
TASK_LIBRARIES = ('tensorflow', 'tensorflow_text', 'tensorflow_datasets', 'seqio')
INSTALL_COMMAND = "pip install 'remixer-t5x[train]'"
# Whether to show the standard error output of libraries during import.
verbose = False
# Log levels that the C++ libraries of TensorFlow, gRPC and XLA read when they are loaded.
_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3', 'GRPC_VERBOSITY': 'ERROR', 'GLOG_minloglevel': '3'}
# Modules that TensorFlow, TensorFlow Text and seqio import but rarely use: Keras, and hyperparameter search.
_DELAYED_MODULES = ('keras.src.optimizers', 'tensorflow_text.python.keras', 'pyglove')


class _LazyLibrary:
    """A proxy for the module `name`, which is imported when an attribute is first accessed."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(_load_library(self._name), attribute)
        # Cache the attribute, because parsing one data file can access attributes a million times.
        setattr(self, attribute, value)
        return value


def _load_library(name: str) -> Any:
    import_tensorflow()
    return _import_quickly(name)


def check_libraries_installed(*names: str) -> None:
    """Raises UserError if one of the libraries `names` (by default all that tasks require) is not installed."""
    for name in names or TASK_LIBRARIES:
        if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
            raise UserError(f'{name} must be installed; run {INSTALL_COMMAND}')


def get_file_error_types() -> tuple[type[BaseException], ...]:
    """Returns the exception types that file and bucket access can raise. Does not import TensorFlow."""
    tensorflow = sys.modules.get('tensorflow')
    # Opening a bucket raises ImportError if the package for its storage service is not installed.
    return (OSError, ImportError, *([] if tensorflow is None else [tensorflow.errors.OpError]))


@functools.cache
def import_tensorflow() -> Any:
    """Imports TensorFlow and hides accelerators from it, even if TensorFlow has already been imported.

    Discards TensorFlow's log output during the import.
    """
    if not verbose:
        set_log_levels()
    tensorflow = _import_quickly('tensorflow')
    # Hide accelerators, because TensorFlow would allocate all GPU memory at its first operation.
    with discard_stderr():
        for kind in ('GPU', 'TPU'):
            try:
                tensorflow.config.set_visible_devices([], kind)
            except RuntimeError:
                # TensorFlow cannot hide devices after initializing them. Ignore the error if there are no devices.
                if tensorflow.config.list_logical_devices(kind):
                    raise
    return tensorflow


def set_log_levels() -> None:
    """Sets environment variables for the log levels of C++ libraries, which read them only once."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def discard_stderr() -> Iterator[None]:
    """Discards the standard error output of the block, which libraries print, unless `verbose` is set."""
    if verbose:
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, 'wb') as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextlib.contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Handles Ctrl-C at the end of the block, because TensorFlow aborts the process if its import is interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


def _import_quickly(name: str) -> Any:
    """Imports a library without the modules in `_DELAYED_MODULES`, which saves a quarter of the time and 110 MB.

    A placeholder for each of these modules imports the module when an attribute is first accessed.
    """
    if sys.modules.get(name) is not None:
        return sys.modules[name]
    check_libraries_installed(name)
    placeholders = {module: types.ModuleType(module) for module in _DELAYED_MODULES if module not in sys.modules}
    for placeholder in placeholders.values():
        placeholder.__dict__['__getattr__'] = functools.partial(_import_attribute, placeholder)
    sys.modules.update(placeholders)
    try:
        with discard_stderr(), _defer_interrupts():
            return importlib.import_module(name)
    finally:
        for module in placeholders:
            sys.modules.pop(module, None)


def _import_attribute(placeholder: types.ModuleType, attribute: str) -> Any:
    name = placeholder.__name__
    # Do not import the module when the import system accesses an attribute such as __path__.
    if attribute.startswith('__') or sys.modules.get(name) is placeholder:
        raise AttributeError(f'module {name!r} has no attribute {attribute!r}')
    return getattr(importlib.import_module(name), attribute)


def has_extra(name: str) -> bool:
    """Returns whether the installation includes the folder `remixer_t5x/extras/NAME`."""
    try:
        return importlib.util.find_spec(f'remixer_t5x.extras.{name}') is not None
    except ModuleNotFoundError:
        return False


def import_extra(name: str) -> Any:
    """Imports `remixer_t5x.extras.NAME`. Raises UserError if the extra is not installed.

    Other packages of `remixer_t5x` must import extras only through `import_extra`.
    """
    folder = name.partition('.')[0]
    if not has_extra(folder):
        raise UserError(f'remixer_t5x/extras/{folder} is missing from this installation; reinstall remixer-t5x')
    return importlib.import_module(f'remixer_t5x.extras.{name}')


if TYPE_CHECKING:
    import seqio
    import tensorflow as tf
    import tensorflow_datasets as tfds
    import tensorflow_text as tf_text
else:
    seqio, tf = _LazyLibrary('seqio'), _LazyLibrary('tensorflow')
    tf_text, tfds = _LazyLibrary('tensorflow_text'), _LazyLibrary('tensorflow_datasets')

__all__ = ['get_file_error_types', 'has_extra', 'import_extra', 'seqio', 'tf', 'tf_text', 'tfds']
