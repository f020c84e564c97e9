"""Fingerprints the data of a task or mixture, so that a resumed run can detect changed data and name the changed file.

A fingerprint is computed from the file names relative to their common folder, the file sizes, and the first and last
bytes of each file, so it does not change when the folder is moved or copied. A change in the middle of a large file is
not detected if the size is unchanged, because hashing all data at every start would be too slow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.data.resumable_iterator import wrap_task_errors
from remixer_t5x.errors import UserError, root_cause_message
from remixer_t5x.lazy_imports import seqio, tf

# The fingerprint of one task. `source` is the class name of the data source; `files` is the number of files, or None if
# the source does not read files; `hash` covers all files; `each` maps each file name to the file's size and hash, and
# is omitted for more than MAX_HASHED_FILES files.
FingerprintRecord = dict[str, Any]

# If a task has more files than this, only their names and sizes are hashed, and the changed file cannot be named.
MAX_HASHED_FILES = 64
# Files of at most WHOLE_BYTES bytes are hashed completely. For a larger file, only the first END_BYTES bytes and the
# last END_BYTES bytes are hashed.
WHOLE_BYTES = 1 << 20
END_BYTES = 1 << 16
# URLs that TensorFlow cannot read. The URL of a file on the Hugging Face Hub contains its commit.
URL_PREFIXES = ('hf://', 'http://', 'https://')


def fingerprint_data(
    provider: seqio.Task | seqio.Mixture, split: str, use_cached: bool = False
) -> dict[str, FingerprintRecord]:
    """Returns a dictionary that maps each task name to the task's fingerprint, a JSON value.

    Skips tasks without the split. If `use_cached` is true, fingerprints seqio's caches instead of the tasks' sources;
    `pipeline.require_cache` must have found these caches. Raises UserError if a file is missing or cannot be read.
    """
    return fingerprint_tasks(seqio.get_subtasks(provider), split, use_cached)


def fingerprint_tasks(
    tasks: Iterable[seqio.Task], split: str, use_cached: bool = False
) -> dict[str, FingerprintRecord]:
    """Returns the fingerprint of each task that has the split, as `fingerprint_data` does for a mixture."""
    tasks = sorted(tasks, key=lambda task: task.name)
    return {task.name: _fingerprint_task(task, split, use_cached) for task in tasks if split in task.splits}


def _fingerprint_task(task: seqio.Task, split: str, use_cached: bool) -> FingerprintRecord:
    paths = _list_task_files(task, split, use_cached)
    record: FingerprintRecord = {'source': 'cache' if use_cached else type(task.source).__name__, 'files': None}
    if paths is None:
        return record
    # Remove the path of the common folder from all file names.
    prefix_length = os.path.commonprefix([path[: path.rfind('/') + 1] for path in paths]).rfind('/') + 1
    reads_content = len(paths) <= MAX_HASHED_FILES
    signatures = {path[prefix_length:]: compute_file_signature(path, reads_content) for path in paths}
    text = '\n'.join(f'{name}\t{signature}' for name, signature in signatures.items())
    record.update(files=len(paths), hash=compute_short_hash(text))
    return record | ({'each': signatures} if reads_content else {})


def _list_task_files(task: seqio.Task, split: str, use_cached: bool) -> list[str] | None:
    """Lists the files of a task in reading order. Returns None if the source does not read files."""
    if use_cached:
        return sorted(tf.io.gfile.glob(f'{seqio.get_cached_tfrecord_prefix(task.cache_dir, split)}-*'))
    if isinstance(task.source, seqio.FunctionDataSource):
        return None
    with wrap_task_errors(task.name):
        shards = [os.fspath(shard) for shard in task.source.list_shards(split)]
    has_files = isinstance(task.source, seqio.FileDataSource) or any('/' in shard for shard in shards)
    return shards if has_files else None


def compute_file_signature(path: str, reads_content: bool = True) -> str:
    """Returns a file's size as a string, followed by a content hash if the file is local and `reads_content` is true.

    If the path starts with one of URL_PREFIXES, returns a hash of the URL. For other remote files, returns the size, or
    '' if `reads_content` is false.
    """
    if path.startswith(URL_PREFIXES):
        return compute_short_hash(path)
    try:
        if '://' in path:
            # Requesting the sizes of many remote files would be slow.
            return str(tf.io.gfile.stat(path).length) if reads_content else ''
        size = os.stat(path).st_size
        if not reads_content:
            return str(size)
        with untrusted_files.open_file(path) as file:
            content = file.read(WHOLE_BYTES if size <= WHOLE_BYTES else END_BYTES)
            if size > WHOLE_BYTES:
                file.seek(size - END_BYTES)
                content += file.read(END_BYTES)
        return f'{size} {compute_short_hash(content)}'
    except (OSError, tf.errors.OpError) as error:
        raise UserError(
            f'{path} cannot be read ({root_cause_message(error)}); restore the file, or use the new path if the data '
            'was moved'
        ) from error


def compute_short_hash(text: str | bytes) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256 hash of a text."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


def describe_data_difference(old: Mapping[str, FingerprintRecord], new: Mapping[str, FingerprintRecord]) -> str | None:
    """Describes the first difference between two data fingerprints. Returns None if the fingerprints are equal."""
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if before is None or now is None:
            return f'task {name} was {"added" if before is None else "removed"}'
        if before != now:
            summaries = [f'{record.get("files")} files read by {record.get("source")}' for record in (before, now)]
            old_files, new_files = before.get('each') or {}, now.get('each') or {}
            files = [file for file in sorted({*old_files, *new_files}) if old_files.get(file) != new_files.get(file)]
            first = f', beginning with {files[0]}' if files else ''
            return f'task {name} has different files{first} (before: {summaries[0]}; now: {summaries[1]})'
    return None
