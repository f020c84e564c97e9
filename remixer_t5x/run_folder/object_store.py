"""Reads and writes files on a disk or in a bucket (`gs://bucket/folder`), and describes errors.

Three libraries access buckets: etils reads and writes small files through TensorFlow, TensorStore reads and writes
arrays, and Orbax lists and deletes checkpoints through google-cloud-storage. An object in a bucket is written
atomically, but it cannot be locked, renamed atomically or appended to, and it can be overwritten only about once per
second. `GrowingObject` therefore buffers a growing file in memory and periodically uploads the whole file.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from remixer_t5x import lazy_imports, temporary_files
from remixer_t5x.errors import UserError

GOOGLE_SCHEME = 'gs://'
STORAGE_LIBRARY = 'google.cloud.storage'
# Timeout in seconds for checking that a bucket is accessible before a run starts.
BUCKET_CHECK_SECONDS = 30.0
# Seconds between uploads of a growing object.
UPLOAD_SECONDS = 10.0


class WriteError(UserError):
    """Raised if a file of a run cannot be written because the disk is full, read-only or broken."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Returns whether `path` is a URL, such as gs://bucket/folder, rather than a path in the file system."""
    return '://' in os.fspath(path)


def write_atomically(path: epath.Path, text: str) -> None:
    """Writes `text` to `path` atomically: even after a power loss, the file contains either the old or the new text."""
    if is_remote(path):
        path.write_text(text)
        return
    new_file = path.parent / (path.name + '.new')
    new_file.write_text(text)
    temporary_files.sync_and_rename(new_file, path)


def check_bucket_accessible(folder: epath.Path) -> None:
    """Raises UserError if `folder` is in a bucket that is not accessible. Does not check local folders."""
    if not is_remote(folder):
        return
    try:
        retry = importlib.import_module(f'{STORAGE_LIBRARY}.retry').DEFAULT_RETRY.with_timeout(BUCKET_CHECK_SECONDS)
        _create_storage_client().get_bucket(_parse_bucket_name(folder), retry=retry, timeout=BUCKET_CHECK_SECONDS)
    except ImportError as error:
        raise UserError(
            f'google-cloud-storage must be installed for {folder} ({describe_error(error)}); '
            "run pip install 'remixer-t5x[gcs]'"
        ) from error
    except Exception as error:
        raise UserError(
            f'{GOOGLE_SCHEME}{_parse_bucket_name(folder)} cannot be used: {describe_error(error)}'
        ) from error


@contextlib.contextmanager
def wrap_read_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Converts disk and bucket errors to a UserError that explains why `path` cannot be read."""
    if is_remote(path) and 'tensorflow' not in sys.modules and importlib.util.find_spec('tensorflow'):
        # Otherwise, etils would import TensorFlow without discarding its log output.
        lazy_imports.import_tensorflow()
    try:
        yield
    except lazy_imports.get_file_error_types() as error:
        raise UserError(f'{os.fspath(path)} cannot be read: {describe_error(error)}') from error


@contextlib.contextmanager
def wrap_write_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Converts disk and bucket errors to a WriteError that explains why `path` cannot be written."""
    try:
        yield
    except lazy_imports.get_file_error_types() as error:
        advice = 'run' if is_remote(path) else 'free disk space or check the permissions of its folder, and run'
        raise WriteError(
            f'{path} cannot be written ({describe_error(error)}); {advice} the same command again'
        ) from error


def describe_error(error: BaseException) -> str:
    """Describes a disk or bucket error in one line."""
    text = getattr(error, 'message', None) or getattr(error, 'strerror', None) or str(error)
    text = ' '.join(str(text).split('\n\t')[0].split()) or type(error).__name__
    # Omit the middle of a long message: the failed operation is at the start, and the system's error is at the end.
    return text if len(text) <= 200 else f'{text[:80]} ... {text[-110:]}'


def _create_storage_client() -> Any:
    return importlib.import_module(STORAGE_LIBRARY).Client()


def _parse_bucket_name(folder: epath.Path) -> str:
    return os.fspath(folder).removeprefix(GOOGLE_SCHEME).partition('/')[0]


class GrowingObject:
    """A writable file object that buffers the data of a growing object in memory, and uploads the whole object.

    `flush` uploads new data, and raises one of `lazy_imports.get_file_error_types()` on failure; the next call retries
    the upload. `upload_if_due` uploads at most once every UPLOAD_SECONDS seconds, and ignores failures.
    """

    def __init__(self, path: epath.Path, data: bytes = b''):
        self._path, self._data = path, bytearray(data)
        self._uploaded_bytes = -1
        self._last_attempt_time = -math.inf

    def write(self, data: bytes) -> None:
        self._data += data

    def upload_if_due(self) -> None:
        if time.monotonic() - self._last_attempt_time >= UPLOAD_SECONDS:
            with contextlib.suppress(*lazy_imports.get_file_error_types()):
                self.flush()

    def flush(self) -> None:
        if self._uploaded_bytes < len(self._data):
            self._last_attempt_time = time.monotonic()
            self._path.write_bytes(bytes(self._data))
            self._uploaded_bytes = len(self._data)

    def close(self) -> None:
        self.flush()
