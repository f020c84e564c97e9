"""Defines the dataset configuration, resolves the task or mixture, and checks vocabularies and caches.

`task_batches` reads the examples; `batch_formats` lists the arrays of a batch. The fields of `DatasetConfig` have the
same names as in T5X.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from etils import epath

from remixer_t5x import ranges
from remixer_t5x.data import batch_formats, fingerprint, task_vocabulary
from remixer_t5x.errors import UserError, suggest_similar_name
from remixer_t5x.lazy_imports import seqio

# A task or mixture may be passed as a function, so that seqio is imported only when the function is called.
TaskOrName: TypeAlias = 'str | seqio.Task | seqio.Mixture | Callable[[], str | seqio.Task | seqio.Mixture]'


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
    """The settings of a dataset.

    Attributes:
        mixture_or_task_name: a task or mixture, its name, or a function that returns one of these.
        task_feature_lengths: maximum number of tokens of each feature; see `batch_formats.FORMATS`.
        batch_size: number of rows of a global batch.
        split: the split to read.
        shuffle: whether to shuffle files and examples.
        seed: seed for shuffling and for random preprocessors.
        pack: whether to pack several short examples into a row.
        use_cached: whether to read the output of `remixer-t5x data cache` in `cache_dir`.
        cache_dir: the folder of the caches; None for seqio's folders.
        model_type: the model type, which determines the arrays of a batch.
        labels: the label strings of a classifier or token tagger; None for regression and for other model types.
        doc_stride: for the model type 'span', the number of tokens between the starts of consecutive windows of a long
            context; None disables overlap.
        streams: number of streams into which the data is split, over all hosts; the number determines the order of
            the examples. None creates one stream per host when the run starts, or one stream with `length_buckets`.
        save_position: whether checkpoints contain the data position. False allows any data source, including Python
            generators, but a resumed run then reads the data from the beginning, in a different order.
        length_buckets: increasing row lengths of `inputs` below the length in `task_feature_lengths`. The rows of a
            training batch have similar lengths and are padded to the smallest of these lengths that holds all rows,
            instead of to the full length. Requires an encoder, rows without packing, and a single data stream.
    """

    mixture_or_task_name: TaskOrName
    task_feature_lengths: Mapping[str, int]
    batch_size: ranges.Count
    split: str = 'train'
    shuffle: bool = True
    seed: ranges.NonNegativeInt = 0
    pack: bool = False
    use_cached: bool = False
    cache_dir: str | None = None
    model_type: str = batch_formats.ENCODER_DECODER
    labels: Sequence[str] | None = None
    doc_stride: ranges.Count | None = None
    streams: ranges.Count | None = None
    save_position: bool = True
    length_buckets: Sequence[ranges.Count] = ()

    def __post_init__(self) -> None:
        ranges.check_fields(self)
        get_abstract_batch(self)
        if self.length_buckets:
            self._check_length_buckets()
        if self.streams is not None:
            check_batch_divisible(self.batch_size, self.streams, 'streams')
        if self.cache_dir and not self.use_cached:
            raise UserError(f'USE_CACHED_TASKS must be True to use CACHE_DIR = {self.cache_dir}, got False')

    def _check_length_buckets(self) -> None:
        buckets = [*self.length_buckets, self.task_feature_lengths.get('inputs', 0)]
        if buckets != sorted(set(buckets)):
            raise UserError(
                f"LENGTH_BUCKETS must be increasing lengths below TASK_FEATURE_LENGTHS['inputs'] = {buckets[-1]}, got "
                f'{tuple(self.length_buckets)}'
            )
        for reason, is_excluded in {
            'PACK = True': self.pack,
            f'MODEL_TYPE = {self.model_type!r}': self.model_type == batch_formats.DECODER_ONLY,
            f'STREAMS = {self.streams}': self.streams not in (None, 1),
        }.items():
            if is_excluded:
                raise UserError(f'LENGTH_BUCKETS must be () with {reason}, got {tuple(self.length_buckets)}')

    def count_streams(self, hosts: int) -> int:
        """Returns the number of streams of a run that starts on `hosts` hosts."""
        # With length buckets, all rows of a batch must come from the same stream.
        return self.streams or (1 if self.length_buckets else hosts)


def get_configured_task(config: DatasetConfig) -> seqio.Task | seqio.Mixture:
    """Returns the task or mixture of `config`. Raises UserError if the task name, split or a feature does not exist."""
    task = get_task(config.mixture_or_task_name)
    splits = sorted(task.splits) if task.splits else []
    if splits and config.split not in splits:
        raise UserError(f'the split of {task.name} must be one of {", ".join(splits)}, got {config.split!r}')
    features = batch_formats.select_batch_format(config.model_type, config.task_feature_lengths).features
    missing = [name for name in features if name not in task.output_features]
    if missing:
        raise UserError(
            f'{task.name} has no {" and no ".join(missing)}, which MODEL_TYPE = {config.model_type!r} needs; '
            f'use another task, or set MODEL_TYPE and TASK_FEATURE_LENGTHS for {" and ".join(task.output_features)}'
        )
    return task


def get_task(name: TaskOrName) -> seqio.Task | seqio.Mixture:
    """Returns the task or mixture with this name. Raises UserError for an unknown name."""
    name = name() if callable(name) else name
    if not isinstance(name, str):
        return name
    known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
    if name not in known:
        raise UserError(
            f'MIXTURE_OR_TASK_NAME must be a registered task or mixture, got {name!r}'
            f'{suggest_similar_name(name, known)}; set MIXTURE_OR_TASK_MODULE to the module that registers it'
        )
    return seqio.get_mixture_or_task(name)


def get_vocabulary(config: DatasetConfig) -> seqio.Vocabulary:
    """Returns the vocabulary of a task. Raises UserError if inputs and targets have different vocabularies."""
    return task_vocabulary.get_vocabulary(get_configured_task(config))


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """A dataset configuration with its resolved task, the vocabulary of the targets, and the record for checkpoints.

    `record` contains the task name, the vocabulary record and the data fingerprint.
    """

    config: DatasetConfig
    vocabulary: seqio.Vocabulary
    record: dict[str, Any]


def prepare_data(config: DatasetConfig, model_vocab_size: int) -> PreparedData:
    """Resolves the task, and parses the task's texts and trains its vocabulary unless both are cached.

    Raises UserError if text cannot be read, or if the vocabulary is larger than `model_vocab_size`.
    """
    task = get_configured_task(config)
    vocab = task_vocabulary.get_vocabulary(task)
    task_vocabulary.check_vocabulary_size(task.name, vocab, model_vocab_size)
    if config.model_type == batch_formats.CLASSIFIER:
        from remixer_t5x.data import converters

        converters.check_labels(task, config.labels)
    record = task_vocabulary.get_vocabulary_record(vocab)
    if config.use_cached:
        # Also sets seqio's cache folder.
        require_cache(task, config.cache_dir, record)
    data = fingerprint.fingerprint_data(task, config.split, config.use_cached)
    resolved = dataclasses.replace(config, mixture_or_task_name=task)
    return PreparedData(resolved, vocab, {'task': task.name, 'vocabulary': record, 'data': data})


def format_cache_record(vocabulary_record: str) -> str:
    """Returns the vocabulary record as JSON, the content of a cache's COMPLETED file."""
    return json.dumps({'vocabulary': vocabulary_record})


def require_cache(source: seqio.Task | seqio.Mixture, cache_dir: str | None, vocabulary_record: str) -> None:
    """Sets seqio's cache folder and checks the cache of each task. If `cache_dir` is None, uses seqio's own folders.

    seqio itself does not check the vocabulary of a cache, but reads any folder named after the task.

    Raises:
        UserError: a task does not support caching, has no complete cache, or has a cache for another vocabulary.
    """
    if cache_dir is not None:
        seqio.set_global_cache_dirs([os.path.expanduser(cache_dir)])
    for task in seqio.get_subtasks(source):
        if not task.supports_caching:
            raise UserError(
                f'USE_CACHED_TASKS must be False for {task.name}, which does not support caching, got True; set it to '
                'False, or add seqio.CacheDatasetPlaceholder() to the preprocessors'
            )
        if task.cache_dir is None:
            raise UserError(
                f'CACHE_DIR must contain a complete cache of {task.name}, got {cache_dir}; create it with '
                '`remixer-t5x data cache`'
            )
        cached_record = vocabulary_record
        # seqio's own caches do not record their vocabulary.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            cached_record = json.loads(epath.Path(task.cache_dir, 'COMPLETED').read_text())['vocabulary']
        if cached_record != vocabulary_record:
            raise UserError(
                f'the cache {task.cache_dir} was created with vocabulary {cached_record}, but this run uses '
                f"{vocabulary_record}; use the cache's vocabulary, or create another cache with `remixer-t5x data "
                'cache` and another CACHE_DIR'
            )


def get_abstract_batch(config: DatasetConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of each array of a global batch. Does not read data or import seqio."""
    return batch_formats.get_abstract_batch(
        config.model_type, config.task_feature_lengths, config.batch_size, config.pack
    )


def get_abstract_train_batches(config: DatasetConfig) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """Returns the arrays of a global training batch for each row length of `inputs`, the full length last."""
    lengths = config.task_feature_lengths
    shorter = [
        batch_formats.get_abstract_batch(config.model_type, {**lengths, 'inputs': length}, config.batch_size)
        for length in config.length_buckets
    ]
    return [*shorter, get_abstract_batch(config)]


def get_batch_shapes(config: DatasetConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array of a global batch."""
    return {name: array.shape for name, array in get_abstract_batch(config).items()}


def reseed_resumed_config(config: DatasetConfig, batches: int) -> DatasetConfig:
    """Returns the config of a run resumed after `batches` batches, with a new seed if positions are not saved."""
    if config.save_position or not batches:
        return config
    digest = hashlib.sha256(f'{config.seed} after {batches}'.encode()).digest()
    return dataclasses.replace(config, seed=int.from_bytes(digest[:4], 'little') >> 1)


def check_batch_divisible(batch_size: int, count: int, kind: str = 'hosts') -> None:
    """Raises UserError if the batch size is not a multiple of `count`, the number of hosts or streams."""
    if batch_size % count:
        raise UserError(
            f'BATCH_SIZE must be a multiple of {count}, the number of {kind}, got {batch_size}; use '
            f'{-(-batch_size // count) * count}'
        )
