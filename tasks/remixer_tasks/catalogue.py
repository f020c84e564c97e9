"""Lists the names of all text-to-text tasks, locates their data, and loads examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from remixer_t5x import tf_data
from remixer_t5x.errors import UserError, suggest_similar_name
from remixer_t5x.lazy_imports import seqio
from remixer_tasks.benchmarks import cogs, generation, glue, nli, super_glue, text_task, winograd
from remixer_tasks.benchmarks.text_task import LabelledDataset, TextTask

_SUITES = (super_glue, winograd, glue, nli, cogs, generation)
_ALL = (*(task for suite in _SUITES for task in suite.TASKS), *super_glue.FEW_SHOT, *winograd.FEW_SHOT)
TASKS: dict[str, TextTask] = {task.name: task for task in _ALL}
DATASETS: dict[str, LabelledDataset] = {task.dataset.name: task.dataset for task in TASKS.values()}


def task(name: str, vocabulary: seqio.Vocabulary, data_dir: str | None = None) -> seqio.Task:
    """Returns the seqio task `name` without opening a file. Raises UserError for an unknown name."""
    task = find_task(name)
    source = task.create_source(data_dir)
    return text_task.build_task(name, source, task.to_text, vocabulary, list(task.metrics), task.postprocess)


def find_task(name: str) -> TextTask:
    """Returns the `TextTask` with this name. Raises UserError for an unknown name."""
    if name not in TASKS:
        advice = suggest_similar_name(str(name), TASKS) or '; run remixer-t5x data list for all names'
        raise UserError(f'TASK must be the name of a task, got {name!r}{advice}')
    return TASKS[name]


def locate_splits(
    dataset: LabelledDataset, data_dir: str | None = None, splits: Sequence[str] | None = None
) -> dict[str, str | None]:
    """Returns the files or the TFDS folder of each split, or None for a split without data."""
    from remixer_tasks.corpora.sources import LabelledSource

    source = LabelledSource(dataset, tuple(splits or dataset.splits), data_dir)
    return {split: source.find_origin(split) for split in source.splits}


def get_download_folder(data_dir: str | None = None) -> str:
    """Returns the folder for downloads, which `text_task` searches last."""
    return str(text_task.list_published_folders(data_dir)[-1])


def read_examples(
    name: str, split: str | None = None, n: int = 2, data_dir: str | None = None
) -> tuple[str, list[tuple[dict[str, Any], list[tuple[str, str]]]]]:
    """Returns the name of a split, and its first `n` rows with the (inputs, targets) pairs that a task creates from it.

    If `split` is None, uses the first split that has data.
    """
    task = find_task(name)
    source = task.create_source(data_dir)
    split = split or next((split for split in source.splits if source.find_origin(split)), source.splits[0])
    if source.find_origin(split) is None:
        raise UserError(text_task.describe_missing_files(task.dataset, split, data_dir))
    dataset = source.get_dataset(split, shuffle=False).take(n)
    shown = []
    for index, row in enumerate(tf_data.iterate_as_numpy(dataset)):
        # Rows are processed one at a time, because a task may create any number of examples from a row.
        texts = [
            (example['inputs'].decode(), example['targets'].decode())
            for example in tf_data.iterate_as_numpy(task.to_text(dataset.skip(index).take(1)))
        ]
        shown.append(({column: _decode_bytes(np.asarray(value).tolist()) for column, value in row.items()}, texts))
    return split, shown


def _decode_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode_bytes(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value
