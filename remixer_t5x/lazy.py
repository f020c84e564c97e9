"""TensorFlow and seqio, imported at their first use: their imports take longer than all others together, and only tasks
need them, so an installation for inference lacks them.

    from remixer_t5x.lazy import seqio, tf

A module that does so needs `from __future__ import annotations`, because its signatures would be a first use. A class
that derives from one of their classes is also a first use, so it is in a separate module that is imported where an
object is made.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from remixer_t5x.errors import UserError

# Libraries that only tasks need, and how to install them.
FOR_TASKS = ('tensorflow', 'tensorflow_text', 'tensorflow_datasets', 'seqio')
INSTALL = "pip install 'remixer-t5x[train]'"
# Whether to show what libraries write to file descriptor 2 while they are imported.
verbose = False
# Read by the C++ side of TensorFlow, gRPC and XLA when they are loaded.
_ENVIRONMENT = {'TF_CPP_MIN_LOG_LEVEL': '3', 'GRPC_VERBOSITY': 'ERROR', 'GLOG_minloglevel': '3'}
# TensorFlow tries to import Keras by the first name, and Keras uses the others for pictures and tables.
_NOT_NEEDED = ('keras.src.optimizers', 'matplotlib', 'pandas')
# What seqio imports and rarely uses: layers that TensorFlow Text derives from Keras's, and hyperparameter search.
_RARELY_USED = ('tensorflow_text.python.keras', 'pyglove')


class _Library:
    """A proxy of the module `name`, with the attributes of the module."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(_load(self._name), attribute)
        # Cached, because parsing a file of rows looks attributes up a million times.
        setattr(self, attribute, value)
        return value


def _load(name: str) -> Any:
    _tensorflow()
    if name not in sys.modules:
        with without_stderr(), _uncollected(), _later(_RARELY_USED):
            _import(name)
    return sys.modules[name]


def _import(name: str) -> Any:
    """Imports a library of the extra `train`. Raises UserError if it is not installed."""
    check_installed(name)
    return importlib.import_module(name)


def check_installed(*names: str) -> None:
    """Raises UserError if a library of the extra `train`, by default any of them, is not installed."""
    for name in names or FOR_TASKS:
        if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
            raise UserError(f'this needs {name}, which is not installed; type {INSTALL}')


def file_errors() -> tuple[type[BaseException], ...]:
    """Returns what reading or writing a file or an object in a bucket can raise, for `except`, without TensorFlow."""
    tensorflow = sys.modules.get('tensorflow')
    # ImportError: the package for a kind of bucket is not installed.
    return (OSError, ImportError, *([] if tensorflow is None else [tensorflow.errors.OpError]))


@functools.cache
def _tensorflow() -> Any:
    """Imports TensorFlow and hides accelerators from it, also if another library has imported it already."""
    if not verbose:
        set_environment()
    with without_stderr(), _uncollected(), _without(_NOT_NEEDED):
        tensorflow = _import('tensorflow')
        _hide_accelerators(tensorflow)
    return tensorflow


def _hide_accelerators(tensorflow: Any) -> None:
    """Hides GPUs from TensorFlow, which would take all memory of a GPU at its first operation."""
    for kind in ('GPU', 'TPU'):
        # It is too late if another module has already used them.
        with contextlib.suppress(RuntimeError):
            tensorflow.config.set_visible_devices([], kind)


def set_environment() -> None:
    """Sets the log levels of libraries written in C++, which read them once."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Hides what is written to file descriptor 2, unless the block fails or `verbose` is set."""
    if verbose:
        yield
        return
    sys.stderr.flush()
    # In memory if possible: there may be no folder for temporary files.
    with open(os.memfd_create('stderr'), 'w+b') if hasattr(os, 'memfd_create') else tempfile.TemporaryFile() as buffer:
        saved = os.dup(2)
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        except UserError:
            raise
        except BaseException:
            os.dup2(saved, 2)
            buffer.seek(0)
            with contextlib.suppress(OSError):
                os.write(2, buffer.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@contextlib.contextmanager
def _uncollected():
    """Pauses garbage collection, which takes a fifth of the time of importing TensorFlow and seqio."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _without(names: tuple[str, ...]):
    """Makes importing one of these packages, if it is not loaded yet, fail as if it were not installed."""
    hidden = [name for name in names if name not in sys.modules]
    # Python treats None as a module that cannot be found.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


@contextlib.contextmanager
def _later(names: tuple[str, ...]):
    """Makes importing one of these packages return a stand-in, whose attributes import the package afterwards."""
    absent = [name for name in names if name not in sys.modules]
    stand_ins = {name: types.ModuleType(name) for name in absent}
    for name, module in stand_ins.items():
        module.__dict__['__getattr__'] = functools.partial(_attribute, module, name)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def _attribute(stand_in: types.ModuleType, name: str, attribute: str) -> Any:
    # Python asks modules for names such as __path__ while it imports.
    if attribute.startswith('__') or sys.modules.get(name) is stand_in:
        raise AttributeError(f'module {name!r} has no attribute {attribute!r}')
    return getattr(importlib.import_module(name), attribute)


def has_extra(name: str) -> bool:
    """Returns whether the installation has the folder `remixer_t5x/extras/NAME`."""
    try:
        return importlib.util.find_spec(f'remixer_t5x.extras.{name}') is not None
    except ModuleNotFoundError:
        return False


def import_extra(name: str) -> Any:
    """Imports `remixer_t5x.extras.NAME`, which the core never imports otherwise.

    Raises UserError if the installation lacks that extra.
    """
    module = f'remixer_t5x.extras.{name}'
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f'{module}.'.startswith(f'{error.name}.'):
            raise
        folder = 'remixer_t5x/extras/' + name.partition('.')[0]
        raise UserError(f'this needs {folder}, which was removed from this installation; restore the folder') from None


if TYPE_CHECKING:
    import seqio
    import tensorflow as tf
    import tensorflow_datasets as tfds
    import tensorflow_text as tf_text
else:
    seqio, tf = _Library('seqio'), _Library('tensorflow')
    tf_text, tfds = _Library('tensorflow_text'), _Library('tensorflow_datasets')

__all__ = ['file_errors', 'has_extra', 'import_extra', 'seqio', 'tf', 'tf_text', 'tfds']
