"""Caches the tokenized examples of a task in the format of `seqio_cache_tasks`.

The pipeline consists of seqio's Apache Beam transforms. The pipeline writes the file COMPLETED last; readers ignore
folders without this file. Unlike seqio's script, this module also caches unregistered tasks (workers receive the task
itself), removes the files of a killed job first, and writes a note about the vocabulary to COMPLETED.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
from collections.abc import Iterator
from typing import Any

from remixer_t5x.errors import UserError, import_optional
from remixer_t5x.lazy_imports import seqio, tf
from remixer_tasks.files.cache import ProgressNotice

COMPLETED = 'COMPLETED'
# Beam's DirectRunner is not used, because it would first download another runner.
LOCAL_RUNNER = 'FnApiRunner'


def get_cache_folder(task: seqio.Task, directory: str) -> str:
    """Returns the cache folder of the task in `directory`, named as in seqio."""
    return os.path.join(directory, seqio.get_task_dir_from_name(task.name))


def cache_task(task: seqio.Task, directory: str, note: str, shards: int = 64, beam_options: str | None = None) -> str:
    """Caches every split of a task in `directory` unless it is already cached; returns a summary.

    Raises UserError if the existing cache has a different note, if the task cannot be cached, if the folder contains
    other files, or if the pipeline fails.

    Args:
        directory: a local or gs:// path to which all workers can write.
        note: one-line description of the vocabulary, written to COMPLETED.
        shards: number of files per split; a source with more files is cached in that many files.
        beam_options: Beam's pipeline options as a command line; None runs the pipeline in this process.
    """
    path = get_cache_folder(task, directory)
    before = read_completion_note(path)
    if before is None:
        _write_cache(task, path, note, shards, beam_options)
        return f'{task.name} is cached in {path}'
    if before in (note, ''):
        return f'{task.name} is already cached in {path}; if the text has changed, delete this folder and run again'
    raise UserError(f'the cache {path} was written for {before}, not for {note}; use another CACHE_DIR')


def read_completion_note(path: str) -> str | None:
    """Returns the vocabulary note in COMPLETED, or None if the cache is incomplete."""
    name = os.path.join(path, COMPLETED)
    if not tf.io.gfile.exists(name):
        return None
    with tf.io.gfile.GFile(name) as file:
        return file.read().strip()


def _write_cache(task: seqio.Task, path: str, note: str, shards: int, beam_options: str | None) -> None:
    from remixer_tasks.corpora import sources

    if not task.supports_caching:
        raise UserError(
            f'{task.name} cannot be cached; add seqio.CacheDatasetPlaceholder() to its preprocessors, before the first '
            'one that uses lengths or a seed'
        )
    if isinstance(task.source, sources.StreamedSource):
        raise UserError(f'{task.name} is streamed (HF_STREAMING=True) and cannot be cached; remove HF_STREAMING')
    pipeline = _create_pipeline(beam_options)
    _remove_incomplete_cache(path)
    # Makes this process parse the source files, instead of the workers.
    for split in task.splits:
        task.source.list_shards(split)
    notice = ProgressNotice(f'caching {task.name}')
    with _register_temporarily(task):
        outputs = [
            output for split in sorted(task.splits) for output in _cache_split(pipeline, task, split, path, shards)
        ]
        _add_completion_step(outputs, path, note)
        try:
            pipeline.run().wait_until_finish()
        except Exception as error:
            raise UserError(f'caching {task.name} failed: {_summarize_error(error)}') from error
        if not tf.io.gfile.exists(os.path.join(path, COMPLETED)):
            raise UserError(f'caching {task.name} failed: the pipeline ended without {path}/{COMPLETED}; see its log')
        notice.print_result('done')


def _cache_split(pipeline: Any, task: seqio.Task, split: str, path: str, shards: int) -> list[Any]:
    """Adds the steps for a split to the pipeline; returns the outputs of the steps that write files."""
    import apache_beam as beam
    from seqio import beam_utils

    source = beam_utils.PreprocessTask(task, split, setup_fn=functools.partial(_register_task_in_worker, task))
    shards = max(len(source.shards), shards)
    examples = pipeline | f'{split}_read' >> source | f'{split}_shuffle' >> beam.Reshuffle()
    records = beam_utils.WriteExampleTfRecord(seqio.get_cached_tfrecord_prefix(path, split), shards)
    info = beam_utils.WriteJson(seqio.get_cached_info_path(path, split))
    stats = beam_utils.WriteJson(seqio.get_cached_stats_path(path, split))
    return [
        examples | f'{split}_write' >> records,
        examples | f'{split}_info' >> beam_utils.GetInfo(shards) | f'{split}_write_info' >> info,
        examples | f'{split}_stats' >> beam_utils.GetStats(task.output_features) | f'{split}_write_stats' >> stats,
    ]


def _add_completion_step(outputs: list[Any], path: str, note: str) -> None:
    """Adds a step to the pipeline that writes COMPLETED after all `outputs`."""
    import apache_beam as beam

    nothing = outputs | beam.Flatten() | beam.Filter(lambda _: False)
    name = os.path.join(path, COMPLETED)
    _ = nothing | 'complete' >> beam.io.WriteToText(name, num_shards=1, shard_name_template='', header=note)


def _create_pipeline(beam_options: str | None) -> Any:
    beam = import_optional('apache_beam', 'data cache', 'beam')
    from apache_beam.options.pipeline_options import PipelineOptions

    try:
        flags = shlex.split(beam_options or '')
        options = PipelineOptions([f'--runner={LOCAL_RUNNER}', *flags])
        return beam.Pipeline(options=options)
    except (ValueError, ImportError, SystemExit) as error:
        raise UserError(
            f'BEAM_OPTIONS must be options of Beam, got {beam_options!r} ({_summarize_error(error)})'
        ) from error


def _remove_incomplete_cache(path: str) -> None:
    """Removes the folder of an incomplete cache. Raises UserError if the folder contains other files."""
    if not tf.io.gfile.exists(path):
        return
    names = [name.rstrip('/') for name in tf.io.gfile.listdir(path)]
    foreign = sorted(name for name in names if not re.search(r'\.tfrecord|^(info|stats)\.\w+\.json|^beam-temp-', name))
    if foreign:
        raise UserError(f'{path} contains {foreign[0]}, which is not part of a cache; use another CACHE_DIR')
    tf.io.gfile.rmtree(path)


@contextlib.contextmanager
def _register_temporarily(task: seqio.Task) -> Iterator[None]:
    """Temporarily registers the task under its name, because `seqio.beam_utils` looks up tasks by name."""
    registry = seqio.TaskRegistry
    before = registry.get(task.name) if task.name in registry.names() else None
    registry.remove(task.name)
    registry.add_provider(task.name, task)
    try:
        yield
    finally:
        registry.remove(task.name)
        if before is not None:
            registry.add_provider(task.name, before)


def _register_task_in_worker(task: seqio.Task) -> None:
    if task.name not in seqio.TaskRegistry.names():
        seqio.TaskRegistry.add_provider(task.name, task)


def _summarize_error(error: BaseException) -> str:
    """Returns the most specific line of an error message from Beam, which may contain tracebacks of workers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r'[\w.]*(Error|Exception): ', line)]
    line = next((line for line in errors if 'UserError: ' in line), (errors or lines or [type(error).__name__])[-1])
    return re.sub(r" \[while running '.*$", '', line.split('UserError: ')[-1])
