"""What a person asks about the data of tasks: is it here, how much is it, how do its examples look."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from remixer_t5x import tf_data
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks import catalogue
from remixer_tasks.benchmarks.sources import sources
from remixer_tasks.benchmarks.sources.dataset import Dataset
from remixer_tasks.benchmarks.text_task import TextTask

# Published files up to this many bytes are read to count their examples, which takes some hundredths of a second.
_COUNTED_BYTES = 1_000_000


@dataclasses.dataclass(frozen=True)
class Split:
    """origin: the TFDS folder or the files, None where there is neither.

    amount: '250', the number of examples before preprocessing, or '12 MB' where counting takes long.
    """

    name: str
    origin: str | None
    amount: str


@dataclasses.dataclass(frozen=True)
class Listed:
    """A task. downloads: whether `download.get` can get its data."""

    name: str
    splits: Sequence[Split]
    downloads: bool


@dataclasses.dataclass(frozen=True)
class Shown:
    """An example as its data set has it, and the (inputs, targets) that a task makes of it: none, one or several."""

    raw: dict[str, Any]
    texts: Sequence[tuple[str, str]]


def tasks(data_dir: str | None = None) -> list[Listed]:
    """Every labelled task, in the order of the catalogue."""
    amount = functools.cache(lambda dataset, split: _amount(catalogue.DATASETS[dataset], split, data_dir))
    return [
        Listed(
            task.name,
            [
                Split(split, origin, amount(task.dataset.name, split) if origin else '')
                for split, origin in catalogue.available(task.name, data_dir).items()
            ],
            bool(task.dataset.downloads),
        )
        for task in catalogue.TASKS.values()
    ]


def examples(name: str, split: str | None = None, n: int = 2, data_dir: str | None = None) -> tuple[str, list[Shown]]:
    """The name of the split (None takes the first that is here), and its first `n` examples in the order of the data.

    Raises UserError for an unknown task or split, and for data that is missing or cannot be read.
    """
    task = catalogue.find(name)
    origins = catalogue.available(name, data_dir)
    split = split or next((split for split, origin in origins.items() if origin), next(iter(origins)))
    if split in origins and origins[split] is None:
        raise UserError(sources.missing(task.dataset, split, data_dir))
    dataset = task.source(data_dir).get_dataset(split, shuffle=False).take(n)
    raw = list(tf_data.arrays(dataset))
    # One at a time: tasks make several examples of one, or leave some out.
    return split, [Shown(_plain(row), _texts(task, dataset.skip(index).take(1))) for index, row in enumerate(raw)]


def _texts(task: TextTask, dataset: tf.data.Dataset) -> list[tuple[str, str]]:
    return [
        (example['inputs'].decode(), example['targets'].decode()) for example in tf_data.arrays(task.to_text(dataset))
    ]


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Python's values for TensorFlow's."""
    return {name: _text(np.asarray(value).tolist()) for name, value in row.items()}


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


def _amount(dataset: Dataset, split: str, data_dir: str | None) -> str:
    """'' for data that cannot be read: a list of all tasks must not end at one of them, `examples` tells the reason."""
    try:
        if sources.find_tfds(dataset, data_dir):
            return f'{sources.LabelledSource(dataset, tuple(dataset.splits), data_dir).count(split):,}'
        found = sources.find_raw(dataset, split, data_dir)
        if found is None:
            return ''
        layout, paths = found
        size = sum(os.path.getsize(path) for path in paths)
        if size > _COUNTED_BYTES:
            return f'{size / 1e6:.0f} MB'
        return f'{sum(1 for _ in layout.read(*paths)):,}'
    except (UserError, OSError, KeyError, ValueError):
        return ''
