"""Manages the cache folder, which contains parsed corpora, trained vocabularies and downloads.

The name of an entry is a hash of all values that determine its content, so entries are never changed. If a run is
killed, the next run removes its temporary files and completes its incomplete folders. If two runs create an entry at
the same time, both write the same content.
"""

import contextlib
import errno
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from remixer_t5x import lazy_imports, temporary_files, untrusted_files
from remixer_t5x.errors import UserError, root_cause_message
from remixer_t5x.lazy_imports import tf

# Name of the file in which `mark_entry_complete` lists the names and sizes of an entry's files.
FILE_LIST = 'files.json'
_LOCK = 'lock'
_REDRAW_SECONDS = 0.5


class FileState(NamedTuple):
    """A file's path, size in bytes and modification time in nanoseconds, which together identify its content."""

    path: str
    size: int
    mtime: int


def read_file_state(path: str) -> FileState:
    """Returns the state of a local or remote file. Raises UserError if the file does not exist."""
    try:
        if '://' in path:
            remote = tf.io.gfile.stat(path)
            return FileState(path, remote.length, remote.mtime_nsec)
        local = os.stat(path)
        return FileState(path, local.st_size, local.st_mtime_ns)
    except lazy_imports.get_file_error_types() as error:
        raise UserError(
            f'{path} cannot be read ({root_cause_message(error)}); restore the file and run the command again'
        ) from error


def get_cache_root() -> Path:
    """Returns the cache folder: $REMIXER_T5X_CACHE, or ~/.cache/remixer_t5x."""
    return Path(os.environ.get('REMIXER_T5X_CACHE') or '~/.cache/remixer_t5x').expanduser()


def hash_cache_key(*parts: Any) -> str:
    """Returns a cache entry's name: the first 32 hexadecimal digits of the SHA-256 of `parts` (JSON values)."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def create_cache_entry(entry: Path) -> Iterator[Path]:
    """Yields a temporary path, and renames its file or folder to `entry` at the end of the block."""
    with wrap_write_errors():
        entry.parent.mkdir(parents=True, exist_ok=True)
        with temporary_files.reserve_temporary_path(entry.parent, f'{entry.name}.') as path:
            yield path
            try:
                temporary_files.sync_and_rename(path, entry)
            except OSError:
                # A rename cannot replace the folder if another run has created it.
                if not entry.is_dir():
                    raise


@contextlib.contextmanager
def lock_cache_entry(folder: Path, name: str) -> Iterator[bool]:
    """Locks a folder while the block adds files and calls `mark_entry_complete`; yields whether it is incomplete.

    Other processes wait for the lock and print a message with the entry's `name`.
    """
    with wrap_write_errors():
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / _LOCK)
        try:
            lock.acquire(blocking=False)
        except filelock.Timeout:
            ProgressNotice(f'waiting for another process that prepares {name}')
            lock.acquire()
        try:
            yield not (folder / FILE_LIST).exists()
        finally:
            lock.release()


@contextlib.contextmanager
def wrap_write_errors() -> Iterator[None]:
    """Converts an OSError to a UserError if the cache folder cannot be written or its disk is full."""
    try:
        yield
    except OSError as error:
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if error.errno in (*full, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise UserError(
                f'cannot write to the cache {get_cache_root()} ({os.strerror(error.errno)}); set REMIXER_T5X_CACHE to '
                'a writable folder with free space'
            ) from error
        raise


def mark_entry_complete(folder: Path) -> None:
    """Marks a cache folder as complete by writing the names and sizes of its files, which `check_file_sizes` reads."""
    with temporary_files.reserve_temporary_path(folder, f'{FILE_LIST}.') as unfinished:
        files = [path for path in sorted(folder.iterdir()) if not path.name.startswith((FILE_LIST, _LOCK))]
        unfinished.write_text(json.dumps({path.name: path.stat().st_size for path in files}))
        temporary_files.sync_and_rename(unfinished, folder / FILE_LIST)


def check_file_sizes(folder: Path) -> None:
    """Raises UserError if a file that `mark_entry_complete` listed in `folder` is missing or has a different size."""
    try:
        sizes = untrusted_files.parse_json(untrusted_files.read_bytes(folder / FILE_LIST))
        damaged = [name for name, size in sizes.items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, AttributeError) as error:
        # A damaged list may contain another JSON type, or names that are too long for the file system.
        name = getattr(error, 'filename', None) or folder / FILE_LIST
        raise UserError(
            f'{name} is missing or damaged ({root_cause_message(error)}); {describe_repair(folder)}'
        ) from error
    if damaged:
        raise UserError(f'{folder / damaged[0]} was truncated or changed; {describe_repair(folder)}')


def describe_repair(folder: Path) -> str:
    """Returns the advice to print if a cache entry is damaged."""
    return f'delete the folder {folder} to recreate it'


class ProgressNotice:
    """Reports progress on standard error by redrawing a line on a terminal, or by printing lines in a log."""

    def __init__(self, activity: str):
        self._activity = activity
        self._start = self._drawn = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._print_line(f'{activity} ...', last=not self._terminal)

    def update_progress(self, progress: Callable[[], str]) -> None:
        """Redraws the line with the string that `progress` returns, at most twice per second; does nothing in a log."""
        if self._terminal and time.monotonic() - self._drawn > _REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._print_line(f'{self._activity}: {progress()} ...', last=False)

    def print_result(self, result: str) -> None:
        """Prints the final line, with `result` and the elapsed seconds."""
        self._print_line(f'{self._activity}: {result} ({time.monotonic() - self._start:.1f} s)', last=True)

    def _print_line(self, text: str, last: bool) -> None:
        start = '\r\x1b[2K' if self._terminal else ''
        print(start + text, end='\n' if last else '', file=sys.stderr, flush=True)
