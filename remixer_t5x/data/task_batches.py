"""Reads batches of a task or mixture: an endless, resumable stream for training, and one pass for each evaluation.

tf.data shuffles, packs and batches the examples. A data position is a checkpoint of the tf.data iterator, which
contains the state of all operations, including the shuffle buffer. `DatasetConfig` determines the order of the
examples. A restored iterator returns the same batches as an uninterrupted iterator, even after repeated restores.

TensorFlow's smaller *symbolic* checkpoints are not exact: the next checkpoint of a restored iterator omits the offsets
of files that have not been read since the restore.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from remixer_t5x import tf_data
from remixer_t5x.data import batch_formats, pipeline, task_vocabulary
from remixer_t5x.data.pipeline import DatasetConfig
from remixer_t5x.data.resumable_iterator import (
    ResumableIterator,
    call_without_autograph,
    patch_tf_data,
    wrap_task_errors,
)
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf

Batch = dict[str, np.ndarray]


def open_examples(
    task: seqio.Task | seqio.Mixture, config: DatasetConfig, shard: seqio.ShardInfo | None, epochs: int | None
) -> tf.data.Dataset:
    """Returns the rows of a shard, or of the whole split if `shard` is None; infinite if `epochs` is None."""
    from remixer_t5x.data import converters

    if isinstance(task, seqio.Mixture) and epochs is not None:
        task = _mix_evaluated_tasks(task, config.split)
    lengths = dict(config.task_feature_lengths)
    if config.use_cached:
        pipeline.require_cache(
            task, config.cache_dir, task_vocabulary.get_vocabulary_record(task_vocabulary.get_vocabulary(task))
        )

    options: dict[str, Any] = {}
    if isinstance(task, seqio.Mixture) and config.model_type in converters.TEXT_CONVERTERS:
        # Unlike a task, a mixture removes the original texts by default.
        options['copy_pretokenized'] = True

    def build_dataset() -> tf.data.Dataset:
        # Disable seqio's in-memory cache, which would otherwise be part of the saved position.
        dataset = task.get_dataset(
            lengths,
            split=config.split,
            use_cached=config.use_cached,
            shuffle=config.shuffle,
            seed=config.seed,
            shard_info=shard,
            num_epochs=epochs,
            try_in_mem_cache=False,
            **options,
        )
        return converters.convert_examples(config, dataset, task)

    # A data source with the attribute `repeats` repeats its examples itself. If seqio repeated the examples, it would
    # repeat each stream separately, so epochs would not be exact for streams of unequal length.
    sources = [part.source for part in seqio.get_subtasks(task) if hasattr(part.source, 'repeats')]
    for source in sources:
        source.repeats = epochs is None
    try:
        with wrap_task_errors(task.name), patch_tf_data():
            return call_without_autograph(build_dataset)
    finally:
        for source in sources:
            source.repeats = False


def _mix_evaluated_tasks(mixture: seqio.Mixture, split: str) -> seqio.Mixture:
    """Returns `mixture`, or a mixture with equal rates if all of its tasks with this split have rate 0.

    Tasks with rate 0 are not trained on, but can be evaluated. With only such tasks, seqio would return no examples.
    """
    tasks = [task for task in mixture.tasks if split in task.splits]
    if any(mixture.get_rate(task) for task in tasks):
        return mixture
    return seqio.Mixture(mixture.name, tasks, default_rate=1.0)


def _batch_by_length(rows: tf.data.Dataset, config: DatasetConfig) -> tf.data.Dataset:
    """Batches rows of the same length bucket, and truncates their input arrays to the length of the bucket."""
    arrays = batch_formats.select_batch_format(config.model_type, config.task_feature_lengths).arrays
    names = [name for name, features in arrays.items() if features == ('inputs',)]
    lengths = tf.constant([*config.length_buckets, config.task_feature_lengths['inputs']], tf.int64)

    def find_bucket(row: Mapping[str, tf.Tensor]) -> tf.Tensor:
        tokens = [row[name] for name in names if name.endswith('_input_tokens')]
        last = tf.reduce_max([tf.reduce_max(tf.where(array != 0)) for array in tokens])
        return tf.reduce_sum(tf.cast(last >= lengths, tf.int64))

    def make_batches(bucket: tf.Tensor, group: tf.data.Dataset) -> tf.data.Dataset:
        batches = group.batch(config.batch_size)
        return batches.map(
            lambda batch: {
                name: array[:, : lengths[bucket]] if name in names else array for name, array in batch.items()
            }
        )

    return call_without_autograph(
        lambda: rows.group_by_window(find_bucket, make_batches, window_size=config.batch_size)
    )


def _set_data_options(dataset: tf.data.Dataset, threads: int | None) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_symbolic_checkpoint = False
    if threads:
        # On CPUs, the train step and the input pipeline compete for cores.
        options.threading.private_threadpool_size = threads
        options.threading.max_intra_op_parallelism = 1
    return tf_data.disable_autotune(dataset.with_options(options))


def count_tf_data_threads(backend: str) -> int | None:
    """Returns the number of tf.data threads for training: a quarter of the cores for 'cpu', otherwise None."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(1, cores // 4) if backend == 'cpu' else None


class TrainBatches:
    """Iterates endlessly over training batches. Each host reads one of `share_count` equal shares of each batch.

    A batch concatenates rows from several streams, each of which reads a different subset of the data. The number of
    streams is fixed for a run. If the number of hosts changes, a share contains the rows of several streams or a part
    of the rows of one stream, so a batch contains the same rows for any number of hosts.

    Arrays are [batch_size / share_count, length] int32, except for the float32 arrays in `BatchFormat.floats`. With
    `config.length_buckets`, the length of the input arrays is the smallest bucket that holds all rows of the batch.
    `next` raises UserError if the data cannot be read.

    This host reads share `share_index`. `threads` is the number of tf.data threads, or None for TensorFlow's default.
    If `streams` is None, `config.count_streams` returns the number of streams.
    """

    def __init__(
        self,
        config: DatasetConfig,
        share_index: int = 0,
        share_count: int = 1,
        threads: int | None = None,
        streams: int | None = None,
    ):
        streams = streams or config.count_streams(share_count)
        if config.streams not in (None, streams):
            raise UserError(f'STREAMS must not change during a run, got {config.streams}; set STREAMS = {streams}')
        pipeline.check_batch_divisible(config.batch_size, share_count)
        pipeline.check_batch_divisible(config.batch_size, streams, 'streams')
        # Resolve the task only once, because a task factory returns a new task in each call.
        self._task, self._config = pipeline.get_configured_task(config), config
        stream_rows, share_rows = config.batch_size // streams, config.batch_size // share_count
        first = share_index * share_rows
        indices = range(first // stream_rows, -(-(first + share_rows) // stream_rows))
        offset = first - indices.start * stream_rows
        self._rows = slice(offset, offset + share_rows)
        threads = max(1, threads // len(indices)) if threads else None

        def open_stream(index: int) -> ResumableIterator:
            examples = open_examples(self._task, config, seqio.ShardInfo(index, streams), epochs=None)
            if config.length_buckets:
                batches = _batch_by_length(examples, config)
            else:
                batches = examples.batch(stream_rows, drop_remainder=True)
            return ResumableIterator(_set_data_options(batches, threads), self._task.name, config.save_position)

        self._streams = {index: open_stream(index) for index in indices}
        # Threads read streams in parallel, because TensorFlow releases the GIL.
        self._executor = ThreadPoolExecutor(len(indices), 'stream') if len(indices) > 1 else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        parts = self._read_next_elements(self._streams.values())
        return {
            name: np.concatenate([_cast_to_32_bits(part[name].numpy()) for part in parts])[self._rows]
            for name in parts[0]
        }

    def skip_batches(self, streams: Collection[int]) -> None:
        """Skips one batch in each of the given streams. Ignores streams that this host does not read."""
        self._read_next_elements([self._streams[index] for index in streams if index in self._streams])

    def _read_next_elements(self, streams: Iterable[ResumableIterator]) -> list[Any]:
        """Returns the next element of each stream. Raises UserError if a stream does not contain a full batch."""
        parallel_map = self._executor.map if self._executor else map
        parts: list[Any] = list(parallel_map(lambda stream: next(stream, None), streams))
        if None in parts:
            raise UserError(
                f'{self._task.name} has no full batch: split {self._config.split!r} is empty, or has fewer '
                f'examples than BATCH_SIZE = {self._config.batch_size}'
            )
        return parts

    def capture_states(self) -> dict[int, bytes]:
        """Returns the current state of each stream that this host reads."""
        return {index: stream.capture_position() for index, stream in self._streams.items()}

    def restore_states(self, states: Mapping[int, bytes]) -> None:
        """Restores states that `capture_states` returned for the same config. Ignores streams with the state b''."""
        for index, stream in self._streams.items():
            if states[index]:
                stream.restore_position(states[index])


class EvalBatches:
    """Iterates over the first `limit` batches of a split, in the same order each time.

    The last batch is padded with rows of weight zero. Every host reads all examples, but yields only share
    `share_index` of `share_count` equal shares of each batch, so the number of batches and the metrics summed over all
    batches do not depend on the number of hosts. Iteration raises UserError if the data cannot be read.
    """

    def __init__(
        self,
        config: DatasetConfig,
        share_index: int = 0,
        share_count: int = 1,
        limit: int | None = None,
        threads: int | None = None,
    ):
        pipeline.check_batch_divisible(config.batch_size, share_count)
        self._task, self._config = pipeline.get_configured_task(config), config
        rows = config.batch_size // share_count
        self._rows = slice(share_index * rows, (share_index + 1) * rows)
        # Build the dataset only once, because building its graph often takes longer than one pass.
        dataset = open_examples(self._task, config, None, epochs=1).batch(config.batch_size)
        self._dataset = _set_data_options(dataset.take(-1 if limit is None else limit), threads)

    def __iter__(self) -> Iterator[Batch]:
        batches = ResumableIterator(self._dataset, f'{self._task.name}, split {self._config.split!r},', saves=False)
        while (batch := next(batches, None)) is not None:
            arrays = {name: _cast_to_32_bits(value.numpy()) for name, value in batch.items()}
            for name, array in arrays.items():
                padding = [(0, self._config.batch_size - len(array)), *[(0, 0)] * (array.ndim - 1)]
                arrays[name] = np.pad(array, padding)[self._rows]
            yield arrays


def _cast_to_32_bits(value: np.ndarray) -> np.ndarray:
    """Converts a floating-point array to float32 and an integer array to int32."""
    return np.asarray(value, np.float32 if np.issubdtype(value.dtype, np.floating) else np.int32)
