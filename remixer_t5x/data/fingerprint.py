"""Fingerprints the data of a task or mixture, so that a resumed run detects changed data and reports the changed file.

A fingerprint is computed from the file names relative to their common folder, the sizes, and the first and last bytes
of each file, so moving or copying the folder does not change it. Changes in the middle of a large file are not detected
if its size is unchanged, because hashing all data at every start would be too slow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.data.stream import wrap_task_errors
from remixer_t5x.errors import UserError, reason
from remixer_t5x.lazy import seqio, tf

# The fingerprint of one task: 'source' (its class), 'files' (their number, or None for a source without files), 'hash'
# of all files, and, for at most MAX_HASHED_FILES files, 'each': the size and hash of each file by name.
Record = dict[str, Any]

# Fingerprints of more files contain only names and sizes, so differences cannot be attributed to a file.
MAX_HASHED_FILES = 64
# Files of at most WHOLE_BYTES are hashed completely; of larger files, only the first and last END_BYTES.
WHOLE_BYTES = 1 << 20
END_BYTES = 1 << 16
# URLs that TensorFlow cannot read. The URL of a file on the Hugging Face Hub contains its commit.
URL_PREFIXES = ('hf://', 'http://', 'https://')


def data_fingerprint(provider: seqio.Task | seqio.Mixture, split: str, use_cached: bool = False) -> dict[str, Record]:
    """Returns a dictionary from task name to fingerprint, a JSON value.

    Args:
        provider: a task or a mixture.
        split: the split to fingerprint; tasks without it are skipped.
        use_cached: whether tasks read seqio's cache instead of their source.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    tasks = sorted(seqio.get_subtasks(provider), key=lambda task: task.name)
    return {task.name: _task_record(task, split, use_cached) for task in tasks if split in task.splits}


def _task_record(task: seqio.Task, split: str, use_cached: bool) -> Record:
    paths = _list_files(task, split, use_cached)
    record: Record = {'source': 'cache' if use_cached else type(task.source).__name__, 'files': None}
    if paths is None:
        return record
    # The length of the common folder, which is removed from all paths.
    start = os.path.commonprefix([path[: path.rfind('/') + 1] for path in paths]).rfind('/') + 1
    reads_content = len(paths) <= MAX_HASHED_FILES
    marks = {path[start:]: file_signature(path, reads_content) for path in paths}
    record.update(files=len(paths), hash=_short_hash('\n'.join(f'{name}\t{mark}' for name, mark in marks.items())))
    return record | ({'each': marks} if reads_content else {})


def _list_files(task: seqio.Task, split: str, use_cached: bool) -> list[str] | None:
    """Lists the files of a task in reading order. Returns None if the source does not read files."""
    if use_cached:
        if task.cache_dir is None:
            raise UserError(f'{task.name} has no complete cache; create it with `remixer-t5x data cache`')
        return sorted(tf.io.gfile.glob(f'{seqio.get_cached_tfrecord_prefix(task.cache_dir, split)}-*'))
    if isinstance(task.source, seqio.FunctionDataSource):
        return None
    with wrap_task_errors(task.name):
        shards = [os.fspath(shard) for shard in task.source.list_shards(split)]
    has_files = isinstance(task.source, seqio.FileDataSource) or any('/' in shard for shard in shards)
    return shards if has_files else None


def file_signature(path: str, reads_content: bool = True) -> str:
    """Returns the size of a file and, if the file is local and `reads_content` is true, a hash of its content."""
    if path.startswith(URL_PREFIXES):
        return _short_hash(path)
    try:
        if '://' in path:
            # Requesting the sizes of many files would be slow.
            return str(tf.io.gfile.stat(path).length) if reads_content else ''
        size = os.stat(path).st_size
        if not reads_content:
            return str(size)
        with untrusted_files.open_file(path) as file:
            content = file.read(WHOLE_BYTES if size <= WHOLE_BYTES else END_BYTES)
            if size > WHOLE_BYTES:
                file.seek(size - END_BYTES)
                content += file.read(END_BYTES)
        return f'{size} {_short_hash(content)}'
    except (OSError, tf.errors.OpError) as error:
        raise UserError(
            f'{path} cannot be read ({reason(error)}); restore the file, or use the new path if the data has moved'
        ) from error


def _short_hash(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def describe_difference(old: Mapping[str, Record], new: Mapping[str, Record]) -> str | None:
    """Describes the first difference between two results of `data_fingerprint`. Returns None for equal results."""
    for name in sorted({*old, *new}):
        if name not in new:
            return f'task {name} was removed'
        if name not in old:
            return f'task {name} was added'
        if old[name] != new[name]:
            return f'task {name} {_record_difference(old[name], new[name])}'
    return None


def _record_difference(old: Record, new: Record) -> str:
    if old.get('source') != new.get('source'):
        return f'was read by {old.get("source")} and is now by {new.get("source")}'
    if old.get('files') != new.get('files'):
        return f'had {old.get("files")} files and now has {new.get("files")}'
    before, now = old.get('each') or {}, new.get('each') or {}
    removed, added = sorted(before.keys() - now.keys()), sorted(now.keys() - before.keys())
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    if removed and added:
        return f'has the file {added[0]} in place of {removed[0]}'
    if changed:
        return f'has other content in {len(changed)} of its files, such as {changed[0]}'
    return f'has {new.get("files")} files as before, with other names, sizes or order'
