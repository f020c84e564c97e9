"""Creates temporary files and folders, renames them atomically, and removes those of killed processes.

Each temporary file or folder has a lock file, `NAME.lock`. The kernel releases the lock when the process ends. The next
process that creates a temporary entry in the same folder removes all entries whose locks are free.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator

_LOCK_SUFFIX = '.lock'


@contextlib.contextmanager
def reserve_temporary_path(folder: pathlib.Path, prefix: str, suffix: str = '.tmp') -> Iterator[pathlib.Path]:
    """Yields a new path in `folder` for a file or folder, and removes the path at the end of the block.

    First removes files and folders with `suffix` that killed processes have left behind. Raises OSError if `folder` is
    not writable.
    """
    _remove_abandoned_entries(folder, suffix)
    path = folder / f'{prefix}{uuid.uuid4().hex}{suffix}'
    lock = path.with_name(path.name + _LOCK_SUFFIX)
    descriptor = _open_and_lock(lock)
    try:
        yield path
    finally:
        remove_path(path)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _open_and_lock(lock: pathlib.Path) -> int:
    """Opens a file, and locks it if the file system supports locks."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # If the file system does not support locks, other processes never remove the temporary file or folder.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Retry if another process removed the file before it was locked.
        with contextlib.suppress(FileNotFoundError):
            if os.stat(lock).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)


def sync_and_rename(written: str | os.PathLike[str], final: str | os.PathLike[str]) -> None:
    """Syncs a file or a folder with its contents, and renames it to `final`. The rename survives a power loss."""
    for folder, _, names in os.walk(written, topdown=False):
        for name in names:
            sync_to_disk(os.path.join(folder, name))
        sync_to_disk(folder)
    if not os.path.isdir(written):
        sync_to_disk(written)
    os.replace(written, final)
    sync_to_disk(os.path.dirname(os.path.abspath(final)))


def sync_to_disk(path: str | os.PathLike[str]) -> None:
    """Syncs a file or the entries of a folder to the disk. Raises OSError if a file cannot be synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        # Ignore errors for folders, because some network file systems do not support syncing them.
        if not os.path.isdir(path):
            raise
    finally:
        os.close(descriptor)


def remove_path(path: pathlib.Path) -> None:
    """Removes a file or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_abandoned_entries(folder: pathlib.Path, suffix: str) -> None:
    """Removes temporary files and folders with `suffix` whose processes have ended."""
    for lock in folder.glob(f'*{suffix}{_LOCK_SUFFIX}'):
        # Ignore errors, because another process may hold the lock or have removed the file.
        with contextlib.suppress(OSError):
            descriptor = os.open(lock, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_uid != os.getuid():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_path(lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX)))
                lock.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
