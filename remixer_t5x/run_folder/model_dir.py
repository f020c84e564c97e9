"""Finds, creates and locks MODEL_DIR, the folder of a run, and defines the names of its files."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import socket
from collections.abc import Iterator

from etils import epath

from remixer_t5x.errors import UserError, to_one_line
from remixer_t5x.run_folder import object_store

MARKER_FILE = 'remixer_t5x_run.json'
LOCK_FILE = 'run.lock'
CHECKPOINTS = 'checkpoints'
TENSORBOARD = 'tensorboard'
METRICS = 'metrics.jsonl'
CONFIG = 'config.gin'
# File that `convert --from_hf` writes instead of config.gin.
CONVERTED = 'model.gin'
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'seqio', 'tensorflow', 'numpy')


def to_absolute_path(path: str | os.PathLike[str]) -> epath.Path:
    """Returns the absolute path with `~` expanded; `gs://` paths are unchanged.

    Raises UserError for any other URL.
    """
    text = os.fspath(path)
    if not object_store.is_remote(text):
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    if not text.startswith(object_store.GOOGLE_SCHEME):
        scheme = text.partition('://')[0]
        raise UserError(f'{text} must be a local path or a gs:// path, got {scheme}://; use gs://bucket/folder')
    return epath.Path(text)


def check_checkpoint_path(folder: epath.Path) -> None:
    """Raises UserError if Orbax would interpret `folder` as a glob pattern, or store arrays in another folder."""
    if re.search(r'[*?[]', os.fspath(folder)):
        raise UserError(f'{folder} must not contain *, ? or [, which Orbax interprets as a pattern; rename the folder')
    # TensorStore parses a bucket path as a URL and ignores the text after #, and Orbax resolves .. only for arrays, so
    # the arrays of different checkpoints would overwrite each other.
    if object_store.is_remote(folder) and ('#' in os.fspath(folder) or '..' in folder.parts):
        raise UserError(
            f'{folder} must not contain # or .., because Orbax would store arrays in another folder; use another path'
        )


def find_model_dir(path: str | os.PathLike[str]) -> epath.Path | None:
    """Returns the MODEL_DIR that equals or contains `path`, or None if there is none."""
    start = to_absolute_path(path)
    with object_store.wrap_read_errors(start):
        return next((folder for folder in (start, *start.parents) if (folder / MARKER_FILE).is_file()), None)


def find_gin_file(folder: epath.Path) -> epath.Path | None:
    """Returns the gin file that describes the model of a MODEL_DIR, or None if there is none."""
    return next((folder / name for name in (CONFIG, CONVERTED) if (folder / name).is_file()), None)


def check_model_dir(path: str | os.PathLike[str]) -> epath.Path:
    """Checks that `path`, which need not exist, can be used as MODEL_DIR. Returns its absolute path.

    Raises UserError if `path` is a file, or a non-empty folder that is not a MODEL_DIR.
    """
    if not os.fspath(path):
        raise UserError("MODEL_DIR must be a folder for this run, got ''; pass --gin.MODEL_DIR=runs/first")
    folder = to_absolute_path(path)
    check_checkpoint_path(folder)
    object_store.check_bucket_accessible(folder)
    with object_store.wrap_write_errors(folder):
        if folder.exists() and not folder.is_dir():
            raise UserError(f'MODEL_DIR must be a folder, got the file {folder}; use a new or empty folder')
        if folder.exists() and not (folder / MARKER_FILE).exists() and any(folder.iterdir()):
            raise UserError(
                f'MODEL_DIR must be the folder of a run, got {folder} without {MARKER_FILE}; use a new or empty folder'
            )
    return folder


def create_model_dir(path: str | os.PathLike[str]) -> epath.Path:
    """Creates MODEL_DIR. Raises the errors of `check_model_dir`, and UserError if the folder is not writable."""
    folder = check_model_dir(path)
    with object_store.wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # Always write the marker file, to check that the folder is writable.
        (folder / MARKER_FILE).write_text(json.dumps({'format': 'remixer_t5x', 'version': 1}) + '\n')
    return folder


def write_config(folder: epath.Path, text: str) -> None:
    """Writes the operative gin config `text` to config.gin in `folder`. Raises UserError if writing fails."""
    with object_store.wrap_write_errors(folder / CONFIG):
        object_store.write_atomically(folder / CONFIG, text)


def get_package_versions() -> dict[str, str]:
    """Returns the versions of the installed packages that affect the results of a run."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@contextlib.contextmanager
def lock_model_dir(folder: epath.Path) -> Iterator[None]:
    """Holds a lock on `folder` during the `with` block. The kernel releases the lock if the process is killed.

    On NFS, the lock also works across machines. A folder in a bucket is not locked, because buckets do not support
    locks. If another run is using the folder, raises a UserError that identifies the process holding the lock.
    """
    if object_store.is_remote(folder):
        yield
        return
    with contextlib.ExitStack() as stack:
        with object_store.wrap_write_errors(folder / LOCK_FILE):
            # Without O_NONBLOCK, opening a named pipe would block.
            flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(folder / LOCK_FILE, flags, 0o666)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = to_one_line(os.pread(descriptor, 200, 0).decode('utf-8', 'replace')) or 'another process'
                raise UserError(
                    f'MODEL_DIR {folder} is in use by {holder}; wait for it, stop it, or use another MODEL_DIR for '
                    'this run'
                ) from None
            except OSError:
                # Some file systems do not support locks.
                pass
            else:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f'process {os.getpid()} on {socket.gethostname()}'.encode(), 0)
        yield
