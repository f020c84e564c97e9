"""Reads batches of a task or mixture: endlessly and with an exact position for training, or in one pass for evaluation.

tf.data shuffles, packs and batches the examples, and the checkpoint of its iterator, with the state of every operation
including the shuffle buffer, is the position. The order is a function of the config, and a restored iterator continues
with the next batch of an uninterrupted iterator, also after several restores. (TensorFlow's smaller *symbolic*
checkpoints are not exact: a checkpoint of a restored iterator lacks the offsets in files that were not read since.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from remixer_t5x import tf_data
from remixer_t5x.data import pipeline, task_vocabulary
from remixer_t5x.data.pipeline import DatasetConfig
from remixer_t5x.data.stream import (
    Stream,
    hide_accelerators,
    one_line,
    restorable,
    without_autograph,
    without_traceback,
)
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf

Batch = dict[str, np.ndarray]


def _examples(
    task: seqio.Task | seqio.Mixture, config: DatasetConfig, shard: seqio.ShardInfo | None, epochs: int | None
) -> tf.data.Dataset:
    from remixer_t5x.data import converters

    hide_accelerators()
    lengths = dict(config.task_feature_lengths)
    if config.use_cached:
        pipeline.require_cache(task, config.cache_dir, task_vocabulary.record(task_vocabulary.get_vocabulary(task)))

    def build() -> tf.data.Dataset:
        # An in-memory cache would be part of the saved position.
        dataset = task.get_dataset(
            lengths,
            split=config.split,
            use_cached=config.use_cached,
            shuffle=config.shuffle,
            seed=config.seed,
            shard_info=shard,
            num_epochs=epochs,
            try_in_mem_cache=False,
        )
        return converters.convert(
            config.model_type, dataset, lengths, config.pack, task, config.labels, config.doc_stride
        )

    try:
        with restorable(), _repeating(task, epochs is None):
            return without_autograph(build)
    except UserError:
        raise
    except (ValueError, OSError, tf.errors.OpError) as error:
        raise UserError(f'{task.name} cannot be read: {one_line(error)}') from error


@contextlib.contextmanager
def _repeating(task: seqio.Task | seqio.Mixture, repeats: bool) -> Iterator[None]:
    """A context in which sources with an attribute `repeats` repeat their examples themselves, if `repeats`.

    Epochs are then exact for streams of unequal length; seqio repeats each stream separately.
    """
    sources = [part.source for part in seqio.get_subtasks(task) if hasattr(part.source, 'repeats')]
    for source in sources:
        source.repeats = repeats
    try:
        yield
    finally:
        for source in sources:
            source.repeats = False


def _with_options(dataset: tf.data.Dataset, threads: int | None) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_symbolic_checkpoint = False
    if threads:
        # On a CPU the train step and this pipeline compete for the cores.
        options.threading.private_threadpool_size = threads
        options.threading.max_intra_op_parallelism = 1
    return tf_data.without_autotune(dataset.with_options(options))


def threads_beside(backend: str) -> int | None:
    """Returns the number of tf.data threads during training: a quarter of the cores on 'cpu', None otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(1, cores // 4) if backend == 'cpu' else None


class TrainBatches:
    """Iterates endlessly over one of `share_count` equal shares of the rows of every batch.

    A batch consists of the rows of `streams` streams, each of which reads a part of the data (None: `config.streams`,
    or one per share). A run keeps its number of streams. With another number of shares, a share has the rows of several
    streams or some rows of one stream, so every batch has the same rows for any number of hosts.

    `capture` and `restore` save and set the position. Arrays are [batch_size / share_count, length] int32, except for
    `BatchFormat.floats`. `next` raises UserError if the data cannot be read.
    """

    def __init__(
        self,
        config: DatasetConfig,
        share_index: int = 0,
        share_count: int = 1,
        threads: int | None = None,
        streams: int | None = None,
    ):
        streams = streams or config.streams or share_count
        if config.streams not in (None, streams):
            raise UserError(
                f'STREAMS must be as at the start of the run, got {config.streams}; set STREAMS = {streams}'
            )
        pipeline.check_divisible(config.batch_size, share_count)
        pipeline.check_divisible(config.batch_size, streams, 'streams')
        # Called only once, because a task factory returns a new task at each call.
        self._task, self._config = pipeline.get_provider(config), config
        stream_rows, share_rows = config.batch_size // streams, config.batch_size // share_count
        first = share_index * share_rows
        indices = range(first // stream_rows, -(-(first + share_rows) // stream_rows))
        offset = first - indices.start * stream_rows
        self._rows = slice(offset, offset + share_rows)
        threads = max(1, threads // len(indices)) if threads else None

        def open_stream(index: int) -> Stream:
            examples = _examples(self._task, config, seqio.ShardInfo(index, streams), epochs=None)
            dataset = _with_options(examples.batch(stream_rows, drop_remainder=True), threads)
            return Stream(dataset, self._task.name, config.save_position)

        self._streams = {index: open_stream(index) for index in indices}
        # TensorFlow releases the GIL.
        self._executor = ThreadPoolExecutor(len(indices), 'stream') if len(indices) > 1 else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        parts = self._draw(self._streams.values())
        return {name: np.concatenate([_narrow(part[name].numpy()) for part in parts])[self._rows] for name in parts[0]}

    def skip(self, streams: Collection[int]) -> None:
        """Skips one batch in each stream of `streams` that this share reads."""
        self._draw([self._streams[index] for index in streams if index in self._streams])

    def _draw(self, streams: Iterable[Stream]) -> list[Any]:
        """Returns the next element of each stream. Raises UserError as `next` does."""
        parallel_map = self._executor.map if self._executor else map
        parts: list[Any] = list(parallel_map(lambda stream: next(stream, None), streams))
        if None in parts:
            raise UserError(
                f'{self._task.name} has no full batch: split {self._config.split!r} is empty, or has fewer '
                f'examples than BATCH_SIZE = {self._config.batch_size}'
            )
        return parts

    def capture(self) -> dict[int, bytes]:
        """Returns the position before the next batch of each stream that this share reads."""
        return {index: stream.capture() for index, stream in self._streams.items()}

    def restore(self, states: Mapping[int, bytes]) -> None:
        """Sets a position from `capture` of a run with an equal config; empty means the start."""
        for index, stream in self._streams.items():
            if states[index]:
                stream.restore(states[index])


class EvalBatches:
    """Iterates over a split from its start, each time in the same order, for at most `limit` batches.

    Rows of weight zero fill up the last batch. Every host reads all examples and returns its share of the rows
    (`share_index` of `share_count`), so sums do not depend on the number of hosts, and all hosts have the same number
    of batches. Iterating raises UserError if the data cannot be read.
    """

    def __init__(
        self,
        config: DatasetConfig,
        share_index: int = 0,
        share_count: int = 1,
        limit: int | None = None,
        threads: int | None = None,
    ):
        pipeline.check_divisible(config.batch_size, share_count)
        self._task, self._config = pipeline.get_provider(config), config
        rows = config.batch_size // share_count
        self._rows = slice(share_index * rows, (share_index + 1) * rows)
        # Built once, because building the graph often takes longer than a pass.
        dataset = _examples(self._task, config, None, epochs=1).batch(config.batch_size)
        self._dataset = _with_options(dataset.take(-1 if limit is None else limit), threads)

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch in self._dataset:
                yield {name: _fill(value.numpy(), self._config.batch_size)[self._rows] for name, value in batch.items()}
        except tf.errors.OpError as error:
            raise UserError(
                f'{self._task.name} failed in split {self._config.split!r}: {one_line(error)}'
            ) from without_traceback(error)


def _narrow(value: np.ndarray) -> np.ndarray:
    """Converts to float32 or int32."""
    return np.asarray(value, np.float32 if np.issubdtype(value.dtype, np.floating) else np.int32)


def _fill(value: np.ndarray, rows: int) -> np.ndarray:
    value = _narrow(value)
    filled = np.zeros((rows, *value.shape[1:]), value.dtype)
    filled[: len(value)] = value
    return filled
