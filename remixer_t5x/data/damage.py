"""Finds the damaged file of a task after TensorFlow has found damage, because it names the byte but not the file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from remixer_t5x.data import fingerprint
from remixer_t5x.lazy import seqio, tf


def named(provider: seqio.Task | seqio.Mixture, split: str, use_cached: bool = False) -> str:
    """Half a line with the first file that cannot be read to its end, and what to do about it.

    Reads through all files of the split, in the order of their names; says so on standard error.
    """
    for task in seqio.get_subtasks(provider):
        for number, path in enumerate(paths := _paths(task, split, use_cached), 1):
            if number == 1:
                print(f'looking for the damaged one of {len(paths):,} files of {task.name} ...', file=sys.stderr)
            reason = _damage(path, _reader(task, use_cached))
            if reason:
                return f'the damaged file is {path} ({reason}): {_repair(task, path, use_cached)}'
    return 'read one by one, every file is sound: the disk or the connection to it may have failed for a moment'


def _paths(task: seqio.Task, split: str, use_cached: bool) -> list[str]:
    if split not in task.splits:
        return []
    # A source that keeps files of its own may list the user's instead.
    records = getattr(task.source, 'records', None)
    return list(records(split)) if records and not use_cached else fingerprint.files(task, split, use_cached) or []


def _reader(task: seqio.Task, use_cached: bool) -> Callable[[str], tf.data.Dataset]:
    own = getattr(task.source, '_read_file_fn', None)
    return tf.data.TFRecordDataset if use_cached or own is None else own


def _damage(path: str, reader: Callable[[str], tf.data.Dataset]) -> str | None:
    try:
        reader(path).reduce(0, lambda count, *_: count + 1)
    except tf.errors.OpError as error:
        return next(iter(error.message.splitlines()), type(error).__name__).split('}} ')[-1][:150]
    return None


def _repair(task: seqio.Task, path: str, use_cached: bool) -> str:
    folder = os.path.dirname(path)
    if use_cached:
        return f'delete {folder} and make it again with `remixer-t5x data cache`'
    repair = getattr(task.source, 'repair', None)
    return repair(path) if repair else 'put a sound copy in its place'
