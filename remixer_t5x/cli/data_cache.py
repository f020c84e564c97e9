"""`remixer-t5x data cache`: a task's tokenised examples, written once for `USE_CACHED_TASKS = True` to read."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable

import seqio

from remixer_t5x.data import cached_tasks, pipeline
from remixer_t5x.errors import UserError


def run(
    mixture_or_task: str | seqio.Task | seqio.Mixture,
    cache: Callable[[seqio.Task, str, str], list[str]],
    cache_dir: str,
) -> None:
    """Caches each task of a mixture and prints what came out; gin binds the arguments in `runs/data_cache.gin`.

    Args:
        cache: called with a task, a folder and what the cache is to say about itself; returns the lines to print.
        cache_dir: CACHE_DIR, which gets a folder for each task.

    Raises:
        UserError: CACHE_DIR is no folder's name, and what `cache` raises.
    """
    if not isinstance(cache_dir, str) or not cache_dir:
        raise UserError(f'CACHE_DIR is {cache_dir!r}; type where the examples go, as in --output_dir=/data/cached')
    pipeline.hide_accelerators()
    directory = os.path.expanduser(cache_dir)
    provider = pipeline.named(mixture_or_task)
    for task in seqio.get_subtasks(provider):
        vocabulary = pipeline.vocabulary_record(task.output_features['targets'].vocabulary)
        sys.stdout.write('\n'.join(cache(task, directory, cached_tasks.note(vocabulary))) + '\n')
        sys.stdout.flush()
    sys.stdout.write(f'train from it: --gin.USE_CACHED_TASKS=True --gin.CACHE_DIR={shlex.quote(cache_dir)}\n')
