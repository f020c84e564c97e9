"""The datasets of a run: their settings, the task or mixture that they name, and the shapes of a batch.

`task_batches` reads the examples, `frames` lists the arrays of a batch. The names in `DatasetConfig` are T5X's.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from remixer_t5x.data import fingerprint, frames, task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf

FEATURES = ('inputs', 'targets')
# A name, a task or mixture, or a function that returns one of these and so loads seqio only when it is called.
TaskOrName: TypeAlias = 'str | seqio.Task | seqio.Mixture | Callable[[], str | seqio.Task | seqio.Mixture]'


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """The examples of a run, with their shape and order.

    Attributes:
        mixture_or_task_name: a task or mixture, its name, or a function that returns one of these.
        task_feature_lengths: number of tokens of each feature of the task, which `frame` chooses from
            (`frames.FORMATS`).
        batch_size: number of examples of one step over all hosts.
        split: the split to read.
        shuffle: whether to shuffle files and examples.
        seed: fixes the order and every random choice of the preprocessors.
        pack: puts several short examples in one row.
        use_cached: reads what `remixer-t5x data cache` wrote, below `cache_dir`.
        cache_dir: a folder of caches; None for the folders that seqio knows.
        frame: name of the frame, which decides the arrays of a batch.
        labels: the texts of a classifier's labels; None for a regression, or another frame.
        streams: number of parts of the data that the hosts of a run read side by side, which decides the order; None
            for one for each host that starts the run.
        save_position: False allows any source, also a Python generator; a resumed run then begins its data again in
            another order.
    """

    mixture_or_task_name: TaskOrName
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
        batch_format = frames.batch_format(self.frame, self.task_feature_lengths)
        if self.pack:
            frames.packed_arrays(self.frame, batch_format)
        if not frames.is_positive(self.batch_size):
            raise UserError(
                f'BATCH_SIZE must be a positive whole number, got {self.batch_size!r}; give one, as in BATCH_SIZE = 128'
            )
        if self.streams is not None:
            if not frames.is_positive(self.streams):
                raise UserError(
                    f'STREAMS must be a positive whole number, got {self.streams!r}; give one, as in STREAMS = 8'
                )
            check_divides(self.batch_size, self.streams, 'streams')
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UserError(
                f'the dataset seed must be a whole number for an exact resume, got {self.seed!r}; give SEED = 0'
            )
        if self.cache_dir and not self.use_cached:
            raise UserError(f'CACHE_DIR is {self.cache_dir} and is not used; set USE_CACHED_TASKS = True as well')


def provider(config: DatasetConfig) -> seqio.Task | seqio.Mixture:
    """Returns the task or mixture that `config` names.

    Raises UserError for an unknown name, with the nearest known names, an unknown split, and missing features.
    """
    task = get_task(config.mixture_or_task_name)
    splits = sorted(task.splits) if task.splits else []
    if splits and config.split not in splits:
        raise UserError(f'split {config.split!r} is not in {task.name}; its splits are {", ".join(splits)}')
    features = frames.batch_format(config.frame, config.task_feature_lengths).features
    missing = [name for name in features if name not in task.output_features]
    if missing:
        raise UserError(
            f'{task.name} has no {" and no ".join(missing)}, which FRAME = {config.frame!r} reads; give another task, '
            f'or TASK_FEATURE_LENGTHS for {" and ".join(task.output_features)} and a frame that takes them'
        )
    return task


def tasks(config: DatasetConfig) -> list[seqio.Task]:
    """Lists the tasks of the mixture that `config` names, or the one task."""
    return list(seqio.get_subtasks(provider(config)))


def get_task(name: TaskOrName) -> seqio.Task | seqio.Mixture:
    """Returns the task or mixture of that name. Raises UserError for an unknown name, with the nearest known names."""
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return name
    known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:5]
        advice = f'the nearest known names are {", ".join(near)}' if near else 'no task is registered'
        raise UserError(
            f'MIXTURE_OR_TASK_NAME is {name!r}, which is not a known task or mixture; {advice}; '
            'a gin file under configs/data imports the module that registers a task'
        )
    return seqio.get_mixture_or_task(name)


def vocabulary(config: DatasetConfig) -> seqio.Vocabulary:
    """Returns the vocabulary of the task that `config` names; see `task_vocabulary.of`."""
    return task_vocabulary.of(provider(config))


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Data that is ready to be read.

    Attributes:
        config: its settings, with the task itself in place of a name or a function.
        vocabulary: of the targets.
        record: the task's name as `task`, the record of its vocabulary as `vocabulary`, and as `data` the fingerprint
            of its files.
    """

    config: DatasetConfig
    vocabulary: seqio.Vocabulary
    record: dict[str, Any]


def prepare(config: DatasetConfig, model_vocab_size: int) -> Prepared:
    """Prepares what the task needs: a parsed corpus, a trained vocabulary.

    Raises UserError if text cannot be read, or if the task has ids that are not in the model's table.
    """
    task = provider(config)
    vocab = task_vocabulary.of(task)
    task_vocabulary.check_ids(task.name, vocab, model_vocab_size)
    if config.frame == frames.CLASSIFIER:
        from remixer_t5x.data import converters

        converters.check_labels(task, config.labels)
    record = task_vocabulary.record(vocab)
    if config.use_cached:
        # This also makes seqio look for the cache there.
        require_cache(task, config.cache_dir, record)
    data = fingerprint.data_fingerprint(task, config.split, config.use_cached)
    resolved = dataclasses.replace(config, mixture_or_task_name=task)
    return Prepared(resolved, vocab, {'task': task.name, 'vocabulary': record, 'data': data})


def cache_note(vocabulary_record: str) -> str:
    """Returns the content of a cache's file COMPLETED; `vocabulary_record` is from `task_vocabulary.record`."""
    return json.dumps({'vocabulary': vocabulary_record})


def require_cache(source: seqio.Task | seqio.Mixture, cache_dir: str | None, vocabulary_record: str) -> None:
    """Makes seqio look only into `cache_dir` (None keeps its folders), and checks the cache of each task.

    seqio would read any folder of the task's name, also with ids of another vocabulary. Caches of other programs do not
    record their vocabulary and are not checked for it.

    Raises:
        UserError: a task cannot be cached, has no complete cache, or has a cache with another vocabulary.
    """
    if cache_dir is not None:
        seqio.set_global_cache_dirs([os.path.expanduser(cache_dir)])
    for task in seqio.get_subtasks(source):
        if not task.supports_caching:
            raise UserError(
                f'USE_CACHED_TASKS is True and {task.name} cannot be cached: put seqio.CacheDatasetPlaceholder() among '
                'its preprocessors, or set USE_CACHED_TASKS=False'
            )
        if task.cache_dir is None:
            place = f'CACHE_DIR = {cache_dir}' if cache_dir else 'CACHE_DIR, which is not set,'
            raise UserError(
                f'USE_CACHED_TASKS is True and {place} has no complete cache of {task.name}; create it with '
                '`remixer-t5x data cache`'
            )
        cached_record = _cached_vocabulary_record(task.cache_dir)
        if cached_record not in (None, vocabulary_record):
            raise UserError(
                f'{task.cache_dir} was cached with the vocabulary {cached_record} and this run has '
                f'{vocabulary_record}; use that vocabulary, or create another cache with `remixer-t5x data cache` and '
                'another CACHE_DIR'
            )


def _cached_vocabulary_record(cache_dir: str) -> str | None:
    with tf.io.gfile.GFile(os.path.join(cache_dir, 'COMPLETED')) as file:
        text = file.read()
    try:
        return json.loads(text)['vocabulary']
    except (ValueError, KeyError, TypeError):
        return None


def abstract_batch(config: DatasetConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of each array of one global batch, without reading data or loading seqio."""
    return frames.abstract_batch(config.frame, config.task_feature_lengths, config.batch_size, config.pack)


def batch_shapes(config: DatasetConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of `abstract_batch`."""
    return {name: array.shape for name, array in abstract_batch(config).items()}


def resumed(config: DatasetConfig, batches: int) -> DatasetConfig:
    """Returns `config` for a run that has drawn `batches` batches: without a saved position, with another order."""
    if config.save_position or not batches:
        return config
    digest = hashlib.sha256(f'{config.seed} after {batches}'.encode()).digest()
    return dataclasses.replace(config, seed=int.from_bytes(digest[:4], 'little') >> 1)


def check_divides(batch_size: int, count: int, kind: str = 'hosts') -> None:
    """Raises UserError if the rows of a batch do not divide over `count` hosts or streams."""
    if batch_size % count:
        raise UserError(
            f'BATCH_SIZE must be a multiple of the {count} {kind}, got {batch_size}; use '
            f'{-(-batch_size // count) * count}'
        )
