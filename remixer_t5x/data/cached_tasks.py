"""Tasks that `remixer-t5x data cache` has written out, in seqio's layout: when they may be read, and when not.

seqio itself would read any folder of the task's name: with ids of another vocabulary too, and for a task that has no
cache it stops with a bare assertion.
"""

from __future__ import annotations

import json
import os

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf

_MAKE = 'make it with `remixer-t5x data cache`'


def note(vocabulary: str) -> str:
    """What the file COMPLETED of a cache says; `vocabulary` as `data.vocabulary_record` gives it."""
    return json.dumps({'vocabulary': vocabulary})


def require(provider: seqio.Task | seqio.Mixture, cache_dir: str | None, vocabulary: str) -> None:
    """Makes seqio look into `cache_dir`, and nowhere else (None: where it does already).

    Raises:
        UserError: a task cannot be cached, has no complete cache, or has one of another vocabulary.
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
    """The vocabulary's record; None in the caches of other programs, which say none."""
    try:
        return json.loads(text)['vocabulary']
    except (ValueError, KeyError, TypeError):
        return None
