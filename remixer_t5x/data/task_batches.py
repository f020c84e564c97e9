"""Batches of a task or mixture: without end and with an exact position to train on, or one pass to evaluate on.

The stream is tf.data's: examples are shuffled, packed and batched there, and its iterator's checkpoints are the
position. They contain the state of every operation, including the shuffle buffer. The same config gives the same order
in every run, and a restored iterator continues with the batch that an uninterrupted iterator would have given next,
also after several restores. (TensorFlow's smaller *symbolic* checkpoints are not exact: a checkpoint of a restored
iterator has lost the places in files that were not read since.)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from remixer_t5x import tf_data
from remixer_t5x.data import cached_tasks, converters, damage, pipeline, task_vocabulary
from remixer_t5x.data.pipeline import DatasetConfig
from remixer_t5x.data.stream import Stream, hide_accelerators, one_line, restorable, without_autograph, without_calls
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf

Batch = dict[str, np.ndarray]


def _examples(
    task: seqio.Task | seqio.Mixture, config: DatasetConfig, shard: seqio.ShardInfo | None, epochs: int | None
) -> tf.data.Dataset:
    hide_accelerators()
    lengths = dict(config.task_feature_lengths)
    if config.use_cached:
        cached_tasks.require(task, config.cache_dir, task_vocabulary.record(task_vocabulary.of(task)))

    def build() -> tf.data.Dataset:
        # In-memory caching is off, because a cache in the pipeline would put its examples into the saved position.
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
        return converters.convert(config.frame, dataset, lengths, config.pack, task, config.labels)

    try:
        with restorable(), _repeating(task, epochs is None):
            return without_autograph(build)
    except UserError:
        raise
    except (ValueError, OSError, tf.errors.OpError) as error:
        raise UserError(f'{task.name} cannot be read: {one_line(error)}') from error


@contextlib.contextmanager
def _repeating(task: seqio.Task | seqio.Mixture, repeats: bool) -> Iterator[None]:
    """A context in which sources with an attribute `repeats` repeat their examples, if `repeats`.

    Their position is then exact, and epochs are, for streams of unequal length; seqio repeats each stream alone.
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
        # On a CPU the train step and this pipeline compete for cores, and XLA needs them more.
        options.threading.private_threadpool_size = threads
        options.threading.max_intra_op_parallelism = 1
    return tf_data.without_autotune(dataset.with_options(options))


def threads_beside(backend: str) -> int | None:
    """Number of tf.data threads during a train step on `backend`: a quarter of the cores on 'cpu', otherwise tf.data's
    choice.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(1, cores // 4) if backend == 'cpu' else None


class TrainBatches:
    """One of `share_count` equal shares of the rows of every batch, without end; `capture` and `restore` save and set
    its position.

    A batch is made of `streams` streams, each of which reads a part of the data (None: as many as `config` says, or one
    for each share), and the streams of one share are read side by side. A run keeps its number of streams. With another
    number of shares, the rows of a share come from several streams, or are some of the rows of one stream, so every
    batch has the same rows for any number of hosts.

    Arrays are [batch_size / share_count, length] int32, except where `frames.FORMS` says so. `next` raises UserError if
    the data cannot be read.
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
            raise UserError(f'STREAMS is {config.streams} and the run began with {streams}; set STREAMS = {streams}')
        pipeline.check_divides(config.batch_size, share_count)
        pipeline.check_divides(config.batch_size, streams, 'streams')
        # Once, because a function would make another task at each call.
        self._task, self._config = pipeline.provider(config), config
        each, own = config.batch_size // streams, config.batch_size // share_count
        first = share_index * own
        read = range(first // each, -(-(first + own) // each))
        self._rows = slice(first - read.start * each, first - read.start * each + own)
        threads = max(1, threads // len(read)) if threads else None
        self._streams = {index: self._opened(seqio.ShardInfo(index, streams), each, threads) for index in read}
        # TensorFlow makes the batch of a stream outside of Python's lock.
        self._side_by_side = ThreadPoolExecutor(len(read), 'stream') if len(read) > 1 else None

    def _opened(self, shard: seqio.ShardInfo, rows: int, threads: int | None) -> Stream:
        dataset = _examples(self._task, self._config, shard, epochs=None).batch(rows, drop_remainder=True)
        return Stream(_with_options(dataset, threads), self._task.name, self._config.save_position)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        parts = self._drawn(self._streams.values())
        return {name: np.concatenate([_narrow(part[name].numpy()) for part in parts])[self._rows] for name in parts[0]}

    def skip(self, streams: Collection[int]) -> None:
        """Goes one batch on in each stream of `streams` that this share reads."""
        self._drawn([self._streams[index] for index in streams if index in self._streams])

    def _drawn(self, streams: Iterable[Stream]) -> list[Any]:
        """The next element of each stream. Raises UserError as `next` does."""
        try:
            side_by_side = self._side_by_side.map if self._side_by_side else map
            parts: list[Any] = list(side_by_side(lambda stream: next(stream, None), streams))
        except UserError as error:
            raise _with_file(error, error.__cause__, self._task, self._config) from error.__cause__
        if None in parts:
            raise UserError(
                f'{self._task.name} gives no batch: split {self._config.split!r} is empty, or has fewer '
                f'examples than BATCH_SIZE = {self._config.batch_size}'
            )
        return parts

    def capture(self) -> dict[int, bytes]:
        """The position before the next batch of each stream that this share reads."""
        return {index: stream.capture() for index, stream in self._streams.items()}

    def restore(self, states: Mapping[int, bytes]) -> None:
        """Goes to a position from `capture`, of a run with an equal config; empty means the start."""
        for index, stream in self._streams.items():
            if states[index]:
                stream.restore(states[index])


class EvalBatches:
    """Iterates over a split from its start, each time in the same order; at most `limit` batches.

    Rows of weight zero fill a last partial batch. Every host reads all examples and keeps its own rows (share
    `share_index` of `share_count`), so the sums do not depend on the number of hosts, and all hosts see the same number
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
        pipeline.check_divides(config.batch_size, share_count)
        self._task, self._config = pipeline.provider(config), config
        rows = config.batch_size // share_count
        self._rows = slice(share_index * rows, (share_index + 1) * rows)
        # Building the graph often takes longer than a pass, so it is built once.
        dataset = _examples(self._task, config, None, epochs=1).batch(config.batch_size)
        self._dataset = _with_options(dataset.take(-1 if limit is None else limit), threads)

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch in self._dataset:
                yield {name: _fill(value.numpy(), self._config.batch_size)[self._rows] for name, value in batch.items()}
        except tf.errors.OpError as error:
            failed = UserError(f'{self._task.name} failed in split {self._config.split!r}: {one_line(error)}')
            raise _with_file(failed, error, self._task, self._config) from without_calls(error)


def _with_file(
    failed: UserError, error: BaseException | None, task: seqio.Task | seqio.Mixture, config: DatasetConfig
) -> UserError:
    """`failed`, which describes `error`, with the name of the damaged file if a file is damaged."""
    if not isinstance(error, tf.errors.DataLossError):
        return failed
    return UserError(f'{failed}; {damage.named(task, config.split, config.use_cached)}')


def _narrow(value: np.ndarray) -> np.ndarray:
    """float32 or int32."""
    return np.asarray(value, np.float32 if np.issubdtype(value.dtype, np.floating) else np.int32)


def _fill(value: np.ndarray, rows: int) -> np.ndarray:
    value = _narrow(value)
    filled = np.zeros((rows, *value.shape[1:]), value.dtype)
    filled[: len(value)] = value
    return filled
