"""Batches from a seqio task or mixture, with an exact position in the stream.

The stream is tf.data's: examples are shuffled, packed and batched there, and its iterator's checkpoints are the
position. They contain the state of every operation, including the shuffle buffer. The same config gives the same order
in every run, and a restored iterator continues with the batch that an uninterrupted iterator would have given next,
also after several restores. (TensorFlow's smaller *symbolic* checkpoints are not exact: a checkpoint of a restored
iterator has lost the places in files that were not read since.)

The names in `DatasetConfig` are T5X's; `frames` says what a batch holds.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import jax
import numpy as np

from remixer_t5x.data import cached_tasks, converters, damage, fingerprint, frames
from remixer_t5x.data.stream import Stream, one_line, restorable, without_autograph
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf

Batch = dict[str, np.ndarray]
FEATURES = ('inputs', 'targets')
# A name, a task or mixture, or a function that makes one of these and so loads seqio when it is called.
Given: TypeAlias = 'str | seqio.Task | seqio.Mixture | Callable[[], str | seqio.Task | seqio.Mixture]'


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """The examples of a run, with their shape and order.

    `batch_size` counts the examples of one step over all hosts. `task_feature_lengths` is the number of tokens of
    each feature of the task, which `frame` chooses from (`frames.FORMS`). `seed` fixes the order and every random
    choice of the preprocessors. `pack` puts several short examples in one row. `use_cached` reads what `remixer-t5x
    data cache` wrote, below `cache_dir`. `labels` are the texts of a classifier's labels; None is a regression, or
    another frame. `streams` is the number of parts of the data that the hosts of a run read side by side (None: one for
    each host that starts the run); it decides the order. Without `save_position`, any source is read, also a Python
    generator, and a resumed run begins its data again in another order.
    """

    mixture_or_task_name: Given
    task_feature_lengths: Mapping[str, int]
    batch_size: int
    split: str = 'train'
    shuffle: bool = True
    seed: int = 0
    pack: bool = False
    use_cached: bool = False
    cache_dir: str | None = None
    frame: str = frames.ENCODER_DECODER
    labels: Sequence[str] | None = None
    streams: int | None = None
    save_position: bool = True

    def __post_init__(self) -> None:
        form = frames.form(self.frame, self.task_feature_lengths)
        if self.pack:
            frames.packed_arrays(self.frame, form)
        if not _is_positive(self.batch_size):
            raise UserError(
                f'BATCH_SIZE is {self.batch_size!r}; it takes a positive whole number, as in BATCH_SIZE = 128'
            )
        if self.streams is not None:
            if not _is_positive(self.streams):
                raise UserError(f'STREAMS is {self.streams!r}; it takes a positive whole number, as in STREAMS = 8')
            _check_divides(self.batch_size, self.streams, 'streams')
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UserError(f'the dataset seed is {self.seed!r}; exact resume needs a whole number, as in SEED = 0')
        if self.cache_dir and not self.use_cached:
            raise UserError(f'CACHE_DIR is {self.cache_dir} and is not used; set USE_CACHED_TASKS = True as well')


def _is_positive(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def hide_accelerators() -> None:
    """Keeps TensorFlow on the CPU. Otherwise its first op would take all memory of the GPUs, which JAX needs."""
    for kind in ('GPU', 'TPU'):
        try:
            tf.config.set_visible_devices([], kind)
        except (RuntimeError, ValueError):
            # TensorFlow is already running, which is harmless if it sees no such device.
            if tf.config.list_logical_devices(kind):
                raise


def provider(config: DatasetConfig) -> seqio.Task | seqio.Mixture:
    """The task or mixture that `config` names. Raises UserError for an unknown name, with the nearest known names, and
    for an unknown split.
    """
    found = named(config.mixture_or_task_name)
    splits = sorted(found.splits) if found.splits else []
    if splits and config.split not in splits:
        raise UserError(f'split {config.split!r} is not in {found.name}; its splits are {", ".join(splits)}')
    wanted = frames.form(config.frame, config.task_feature_lengths).features
    missing = [name for name in wanted if name not in found.output_features]
    if missing:
        raise UserError(
            f'{found.name} has no {" and no ".join(missing)}, which FRAME = {config.frame!r} reads; give another task, '
            f'or TASK_FEATURE_LENGTHS for {" and ".join(found.output_features)} and a frame that takes them'
        )
    return found


def tasks(config: DatasetConfig) -> list[seqio.Task]:
    """The tasks of the mixture that `config` names, or the one task."""
    return list(seqio.get_subtasks(provider(config)))


def named(given: Given) -> seqio.Task | seqio.Mixture:
    """The task or mixture of that name. Raises UserError for an unknown name, with the nearest known names."""
    given = made(given)
    if not isinstance(given, str):
        return given
    known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    if given not in known:
        near = difflib.get_close_matches(given, known, n=3, cutoff=0.4) or known[:5]
        advice = f'the nearest known names are {", ".join(near)}' if near else 'no task is registered'
        raise UserError(
            f'MIXTURE_OR_TASK_NAME is {given!r}, which is not a known task or mixture; {advice}; '
            'a gin file under configs/data imports the module that registers a task'
        )
    return seqio.get_mixture_or_task(given)


def made(given: Given) -> str | seqio.Task | seqio.Mixture:
    """`given`, or what it makes if it is a function."""
    return given() if callable(given) else given


def vocabulary(config: DatasetConfig) -> seqio.Vocabulary:
    """The vocabulary of the targets. Raises UserError if inputs use another vocabulary, because the model has one
    table.
    """
    return vocabulary_of(provider(config))


def vocabulary_of(source: seqio.Task | seqio.Mixture) -> seqio.Vocabulary:
    """`vocabulary`, of a task or mixture."""
    features = source.output_features
    targets = features['targets'].vocabulary
    if 'inputs' in features and features['inputs'].vocabulary != targets:
        raise UserError(
            f'{source.name} has one vocabulary for inputs and another for targets; '
            'the model has one table of embeddings: give both features the same vocabulary'
        )
    return targets


def vocabulary_fingerprint(vocab: seqio.Vocabulary) -> str:
    """16 hex digits that change if ids mean other text."""
    model = getattr(vocab, 'sp_model', None)
    # A vocabulary of words has no model file; its words define what ids mean.
    name = '\n'.join((type(vocab).__name__, *getattr(vocab, 'words', ())))
    text = model if isinstance(model, bytes) else name.encode()
    return hashlib.sha256(text + f'|{vocab.vocab_size}|{vocab.extra_ids}'.encode()).hexdigest()[:16]


def vocabulary_record(vocab: seqio.Vocabulary) -> str:
    """The record of the vocabulary in a checkpoint; a checkpoint with another record does not fit."""
    return f'{vocabulary_fingerprint(vocab)} of {vocab.vocab_size} ids'


def prepare(config: DatasetConfig, model_vocab_size: int, look: bool = True) -> dict[str, Any]:
    """Prepares what the task needs: a parsed corpus, a trained vocabulary.

    Returns the task's name as `task`, its `vocabulary_record` as `vocabulary`, and as `data` the fingerprint of its
    files (None unless `look`). Raises UserError if text cannot be read, or if the task can give ids that the model's
    table does not have.
    """
    source, vocab = provider(config), vocabulary(config)
    check_ids(_name(config), vocab, model_vocab_size)
    if config.frame == frames.CLASSIFIER:
        from remixer_t5x.data import encoder_batches

        encoder_batches.check_labels(source, config.labels)
    record = vocabulary_record(vocab)
    if look and config.use_cached:
        # This also makes seqio look for the cache there.
        cached_tasks.require(source, config.cache_dir, record)
    data = fingerprint.data_fingerprint(source, config.split, config.use_cached) if look else None
    return {'task': source.name, 'vocabulary': record, 'data': data}


def check_vocabulary(config: DatasetConfig, model_vocab_size: int) -> None:
    """Raises UserError if the task can give ids that the model's table does not have."""
    check_ids(_name(config), vocabulary(config), model_vocab_size)


def check_ids(name: str, vocab: seqio.Vocabulary, model_vocab_size: int) -> None:
    """Like `check_vocabulary`, for the vocabulary of `name`."""
    size = vocab.vocab_size
    if size > model_vocab_size:
        raise UserError(
            f'the vocabulary of {name} has {size} ids and the model has VOCAB_SIZE = '
            f'{model_vocab_size}; set VOCAB_SIZE to {-(-size // 128) * 128} or use a smaller vocabulary'
        )


def abstract_batch(config: DatasetConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each array of one global batch, without reading data or loading seqio."""
    return frames.abstract_batch(config.frame, config.task_feature_lengths, config.batch_size, config.pack)


def resumed(config: DatasetConfig, batches: int) -> DatasetConfig:
    """`config` for a run that has drawn `batches` batches: without a saved position, its data begins again in another
    order.
    """
    if config.save_position or not batches:
        return config
    digest = hashlib.sha256(f'{config.seed} after {batches}'.encode()).digest()
    return dataclasses.replace(config, seed=int.from_bytes(digest[:4], 'little') >> 1)


def batch_shapes(config: DatasetConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of `abstract_batch`."""
    return {name: array.shape for name, array in abstract_batch(config).items()}


def _name(config: DatasetConfig) -> str:
    given = made(config.mixture_or_task_name)
    return given if isinstance(given, str) else given.name


def _examples(config: DatasetConfig, shard: seqio.ShardInfo | None, epochs: int | None) -> tf.data.Dataset:
    hide_accelerators()
    source = provider(config)
    lengths = dict(config.task_feature_lengths)
    if config.use_cached:
        cached_tasks.require(source, config.cache_dir, vocabulary_record(vocabulary(config)))

    def build() -> tf.data.Dataset:
        # In-memory caching is off, because a cache in the pipeline would put its examples into the saved position.
        dataset = source.get_dataset(
            lengths,
            split=config.split,
            use_cached=config.use_cached,
            shuffle=config.shuffle,
            seed=config.seed,
            shard_info=shard,
            num_epochs=epochs,
            try_in_mem_cache=False,
        )
        return converters.convert(config.frame, dataset, lengths, config.pack, source, config.labels)

    try:
        with restorable():
            return without_autograph(build)
    except UserError:
        raise
    except (ValueError, OSError, tf.errors.OpError) as error:
        raise UserError(f'{_name(config)} cannot be read: {one_line(error)}') from error


def _with_options(dataset: tf.data.Dataset, threads: int | None) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_symbolic_checkpoint = False
    if threads:
        # On a CPU the train step and this pipeline compete for cores, and XLA needs them more.
        options.threading.private_threadpool_size = threads
        options.threading.max_intra_op_parallelism = 1
        options.autotune.cpu_budget = threads
    return dataset.with_options(options)


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
        _check_divides(config.batch_size, share_count)
        _check_divides(config.batch_size, streams, 'streams')
        self._provider = provider(config)
        # A function would make another task at each call.
        self._config = dataclasses.replace(config, mixture_or_task_name=self._provider)
        each, own = config.batch_size // streams, config.batch_size // share_count
        first = share_index * own
        read = range(first // each, -(-(first + own) // each))
        self._rows = slice(first - read.start * each, first - read.start * each + own)
        threads = max(1, threads // len(read)) if threads else None
        self._open = lambda index: self._opened(seqio.ShardInfo(index, streams), each, threads)
        self._streams = {index: self._open(index) for index in read}
        # TensorFlow makes the batch of a stream outside of Python's lock.
        self._side_by_side = ThreadPoolExecutor(len(read), 'stream') if len(read) > 1 else None

    def _opened(self, shard: seqio.ShardInfo, rows: int, threads: int | None) -> Stream:
        dataset = _examples(self._config, shard, epochs=None).batch(rows, drop_remainder=True)
        return Stream(_with_options(dataset, threads), _name(self._config), self._config.save_position)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            side_by_side = self._side_by_side.map if self._side_by_side else map
            parts: list[Any] = list(side_by_side(lambda stream: next(stream, None), self._streams.values()))
        except UserError as error:
            raise _with_file(error, error.__cause__, self._config) from error.__cause__
        if None in parts:
            raise UserError(
                f'{_name(self._config)} gives no batch: split {self._config.split!r} is empty, or has fewer '
                f'examples than BATCH_SIZE = {self._config.batch_size}'
            )
        return {name: np.concatenate([_narrow(part[name].numpy()) for part in parts])[self._rows] for name in parts[0]}

    def capture(self) -> dict[int, bytes]:
        """The position before the next batch of each stream that this share reads."""
        return {index: stream.capture() for index, stream in self._streams.items()}

    def restore(self, states: Mapping[int, bytes]) -> None:
        """Goes to a position from `capture`, of a run with an equal config; empty means the start."""
        for index in self._streams:
            if states[index]:
                self._restore(index, states[index])

    def _restore(self, index: int, state: bytes) -> None:
        while True:
            try:
                return self._streams[index].restore(state)
            except UserError as error:
                # A source that keeps files of its own may have a remedy (see `text_source.TextSource.mend`).
                sources = [task.source for task in seqio.get_subtasks(self._provider) if hasattr(task.source, 'mend')]
                if self._config.use_cached or not any([source.mend(str(error.__cause__)) for source in sources]):
                    raise
                self._streams[index] = self._open(index)


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
        _check_divides(config.batch_size, share_count)
        self._config = config
        rows = config.batch_size // share_count
        self._rows = slice(share_index * rows, (share_index + 1) * rows)
        # Building the graph often takes longer than a pass, so it is built once.
        dataset = _examples(config, None, epochs=1).batch(config.batch_size)
        self._dataset = _with_options(dataset.take(-1 if limit is None else limit), threads)

    def __iter__(self) -> Iterator[Batch]:
        try:
            for batch in self._dataset:
                yield {name: _fill(value.numpy(), self._config.batch_size)[self._rows] for name, value in batch.items()}
        except tf.errors.OpError as error:
            failed = UserError(f'{_name(self._config)} failed in split {self._config.split!r}: {one_line(error)}')
            raise _with_file(failed, error, self._config) from error


def _with_file(failed: UserError, error: BaseException | None, config: DatasetConfig) -> UserError:
    """`failed`, which describes `error`, with the name of the damaged file if a file is damaged."""
    if not isinstance(error, tf.errors.DataLossError):
        return failed
    return UserError(f'{failed}; {damage.named(provider(config), config.split, config.use_cached)}')


def _check_divides(batch_size: int, count: int, kind: str = 'hosts') -> None:
    if batch_size % count:
        raise UserError(
            f'BATCH_SIZE = {batch_size} does not divide over {count} {kind}; use {-(-batch_size // count) * count}'
        )


def _narrow(value: np.ndarray) -> np.ndarray:
    """float32 or int32."""
    return np.asarray(value, np.float32 if np.issubdtype(value.dtype, np.floating) else np.int32)


def _fill(value: np.ndarray, rows: int) -> np.ndarray:
    value = _narrow(value)
    filled = np.zeros((rows, *value.shape[1:]), value.dtype)
    filled[: len(value)] = value
    return filled
