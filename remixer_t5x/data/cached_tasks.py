"""Checks whether a cache that `remixer-t5x data cache` wrote, in seqio's layout, may be read for a task.

seqio itself would read any folder of the task's name, also with ids of another vocabulary, and stops with a bare
assertion for a task without a cache.
"""

from __future__ import annotations

import json
import os

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf

_MAKE = 'make it with `remixer-t5x data cache`'


def note(vocabulary: str) -> str:
    """The content of the file COMPLETED of a cache; `vocabulary` is from `task_vocabulary.record`."""
    return json.dumps({'vocabulary': vocabulary})


def require(provider: seqio.Task | seqio.Mixture, cache_dir: str | None, vocabulary: str) -> None:
    """Makes seqio look only into `cache_dir` (None keeps its folders).

    Raises:
        UserError: a task cannot be cached, has no complete cache, or has a cache with another vocabulary.
    """
    if cache_dir is not None:
        seqio.set_global_cache_dirs([os.path.expanduser(cache_dir)])
    for task in seqio.get_subtasks(provider):
        _require_task(task, cache_dir, vocabulary)


def _require_task(task: seqio.Task, cache_dir: str | None, vocabulary: str) -> None:
    if not task.supports_caching:
        raise UserError(
            f'USE_CACHED_TASKS is True and {task.name} cannot be cached: put seqio.CacheDatasetPlaceholder() among its '
            'preprocessors, or set USE_CACHED_TASKS=False'
        )
    if task.cache_dir is None:
        where = f'CACHE_DIR = {cache_dir}' if cache_dir else 'CACHE_DIR, which is not set,'
        raise UserError(f'USE_CACHED_TASKS is True and {where} has no complete cache of {task.name}; {_MAKE}')
    with tf.io.gfile.GFile(os.path.join(task.cache_dir, 'COMPLETED')) as file:
        found = _vocabulary(file.read())
    if found is not None and found != vocabulary:
        raise UserError(
            f'{task.cache_dir} was cached with the vocabulary {found} and this run has {vocabulary}; use that '
            f'vocabulary, or another CACHE_DIR and {_MAKE}'
        )


def _vocabulary(text: str) -> str | None:
    """The vocabulary's record; None in the caches of other programs, which do not record it."""
    try:
        return json.loads(text)['vocabulary']
    except (ValueError, KeyError, TypeError):
        return None
