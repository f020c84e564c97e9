"""What a run reads: the settings of its data, the task or mixture that they name, and the shapes of a batch.

`task_batches` reads the examples, `frames` says what a batch holds. The names in `DatasetConfig` are T5X's.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from remixer_t5x import ranges
from remixer_t5x.data import cached_tasks, fingerprint, frames, task_vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio

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
    batch_size: ranges.Count
    split: str = 'train'
    shuffle: bool = True
    seed: ranges.Whole = 0
    pack: bool = False
    use_cached: bool = False
    cache_dir: str | None = None
    frame: str = frames.ENCODER_DECODER
    labels: Sequence[str] | None = None
    streams: ranges.Count | None = None
    save_position: bool = True

    def __post_init__(self) -> None:
        ranges.check_fields(self)
        form = frames.form(self.frame, self.task_feature_lengths)
        if self.pack:
            frames.packed_arrays(self.frame, form)
        if self.streams is not None:
            check_divides(self.batch_size, self.streams, 'streams')
        if self.cache_dir and not self.use_cached:
            raise UserError(f'CACHE_DIR is {self.cache_dir} and is not used; set USE_CACHED_TASKS = True as well')


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

    Raises UserError if text cannot be read, or if the task can give ids that the model's table does not have.
    """
    source = provider(config)
    vocab = task_vocabulary.of(source)
    task_vocabulary.check_ids(source.name, vocab, model_vocab_size)
    if config.frame == frames.CLASSIFIER:
        from remixer_t5x.data import encoder_batches

        encoder_batches.check_labels(source, config.labels)
    record = task_vocabulary.record(vocab)
    if config.use_cached:
        # This also makes seqio look for the cache there.
        cached_tasks.require(source, config.cache_dir, record)
    data = fingerprint.data_fingerprint(source, config.split, config.use_cached)
    own = dataclasses.replace(config, mixture_or_task_name=source)
    return Prepared(own, vocab, {'task': source.name, 'vocabulary': record, 'data': data})


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


def check_divides(batch_size: int, count: int, kind: str = 'hosts') -> None:
    """Raises UserError if the rows of a batch do not divide over `count` hosts or streams."""
    if batch_size % count:
        raise UserError(
            f'BATCH_SIZE = {batch_size} does not divide over {count} {kind}; use {-(-batch_size // count) * count}'
        )
