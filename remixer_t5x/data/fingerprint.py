"""A fingerprint of the data of a task or mixture. Checkpoints store it, so that a resumed run notices other data.

It depends on the names of files below the folder they share, their sizes and their ends, so a folder may be moved or
copied. It does not notice a change in the middle of a large file that keeps its size, because a run cannot read all its
data at every start.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from remixer_t5x import untrusted_files
from remixer_t5x.data.data_changes import Identity
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf

# Beyond this many files of a task only names and sizes count, and a difference is reported without the name of a file.
LOOKED_INTO = 64
# A file of up to this many bytes is read completely; of a larger file, only the first and last END_BYTES are read.
WHOLE_BYTES = 1 << 20
END_BYTES = 1 << 16
# TensorFlow does not read these. The address of a file on the Hugging Face Hub has its commit.
ADDRESSES = ('hf://', 'http://', 'https://')


def data_fingerprint(provider: seqio.Task | seqio.Mixture, split: str, use_cached: bool = False) -> dict[str, Identity]:
    """The record of what each task of `provider` reads for `split`: JSON values by the task's name.

    Args:
        provider: a task, or a mixture; tasks without the split are skipped.
        use_cached: the task reads seqio's cached files instead of the source.

    Returns:
        For each task 'source' (the class), 'files' (their number, None if it does not read files), 'hash' of all files,
        and, up to LOOKED_INTO files, 'each': a hash by name. It does not depend on the folder of the files.

    Raises:
        UserError: a file that the task should read is missing or cannot be read.
    """
    tasks = sorted(seqio.get_subtasks(provider), key=lambda task: task.name)
    return {task.name: _identity(task, split, use_cached) for task in tasks if split in task.splits}


def _identity(task: seqio.Task, split: str, use_cached: bool) -> Identity:
    paths = files(task, split, use_cached)
    identity: Identity = {'source': 'cache' if use_cached else type(task.source).__name__, 'files': None}
    if paths is None:
        return identity
    look = len(paths) <= LOOKED_INTO
    marks = {name: mark(path, look) for name, path in zip(_names(paths), paths, strict=True)}
    identity.update(files=len(paths), hash=_digest('\n'.join(f'{name}\t{mark}' for name, mark in marks.items())))
    if look:
        identity['each'] = marks
    return identity


def files(task: seqio.Task, split: str, use_cached: bool = False) -> list[str] | None:
    """Paths of the files of the task, in reading order; None for a source whose shards are not files."""
    return _cached_files(task, split) if use_cached else _source_files(task, split)


def _cached_files(task: seqio.Task, split: str) -> list[str]:
    if task.cache_dir is None:
        raise UserError(f'{task.name} has no complete cache; make it with `remixer-t5x data cache`')
    return sorted(tf.io.gfile.glob(f'{seqio.get_cached_tfrecord_prefix(task.cache_dir, split)}-*'))


def _source_files(task: seqio.Task, split: str) -> list[str] | None:
    if isinstance(task.source, seqio.FunctionDataSource):
        return None
    try:
        shards = [os.fspath(shard) for shard in task.source.list_shards(split)]
    except UserError:
        raise
    except (ValueError, OSError, tf.errors.OpError) as error:
        raise UserError(f'{task.name} cannot be read: {next(iter(str(error).splitlines()), error)}') from error
    is_of_files = isinstance(task.source, seqio.FileDataSource) or any('/' in shard for shard in shards)
    return shards if is_of_files else None


def _names(paths: Sequence[str]) -> list[str]:
    """The paths relative to the deepest folder that contains them all."""
    parts = [path.split('/') for path in paths]
    shared = len(os.path.commonprefix([folders[:-1] for folders in parts])) if parts else 0
    return ['/'.join(folders[shared:]) for folders in parts]


def mark(path: str, look: bool = True) -> str:
    """The size and, with `look`, a hash of the content of a local file; at most the size of a remote file."""
    if path.startswith(ADDRESSES):
        return _digest(path)
    if '://' in path:
        # Each call is a request to a server.
        return str(_remote_size(path)) if look else ''
    try:
        size = os.stat(path).st_size
        return f'{size} {_content(path, size)}' if look else str(size)
    except OSError as error:
        raise UserError(
            f'{path}: {error.strerror}; put the file back, or give another folder if the data has moved'
        ) from error


def _remote_size(path: str) -> int:
    try:
        return tf.io.gfile.stat(path).length
    except tf.errors.OpError as error:
        raise UserError(f'{path} cannot be read: {next(iter(error.message.splitlines()), "")}') from error


def _content(path: str, size: int) -> str:
    with untrusted_files.opened(path) as file:
        if size <= WHOLE_BYTES:
            return _digest(file.read())
        first = file.read(END_BYTES)
        file.seek(size - END_BYTES)
        return _digest(first + file.read(END_BYTES))


def _digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]
