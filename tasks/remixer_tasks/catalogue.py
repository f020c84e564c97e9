"""Every text-to-text task by its name, and what is known about its data: splits, files here, downloads, examples."""

from __future__ import annotations

import dataclasses
import difflib
import itertools

from remixer_t5x import tf_data
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio
from remixer_tasks.benchmarks import cogs, generation, glue, nli, squad, super_glue
from remixer_tasks.benchmarks.sources import wsc
from remixer_tasks.benchmarks.sources.dataset import TRAIN, Dataset
from remixer_tasks.benchmarks.sources.sources import raw_folders
from remixer_tasks.benchmarks.text_task import TextTask

TASKS: dict[str, TextTask] = {
    task.name: task
    for task in (
        *super_glue.TASKS,
        wsc.TRAINING,
        wsc.EVALUATION,
        wsc.DPR,
        *glue.TASKS,
        *nli.TASKS,
        *squad.TASKS,
        *cogs.TASKS,
        *generation.TASKS,
        *super_glue.FEW_SHOT,
        wsc.FEW_SHOT_TRAINING,
        wsc.FEW_SHOT_EVALUATION,
    )
}
DATASETS: dict[str, Dataset] = {task.dataset.name: task.dataset for task in TASKS.values()}


@dataclasses.dataclass(frozen=True)
class TextExample:
    """What a model sees and should say, before tokens."""

    inputs: str
    targets: str


def task(name: str, vocabulary: seqio.Vocabulary, data_dir: str | None = None) -> seqio.Task:
    """The task `name`, reading from where `sources` finds its data; opens nothing.

    Raises UserError for an unknown name, with the nearest known ones.
    """
    return find(name).build(vocabulary, data_dir)


def find(name: str) -> TextTask:
    """The task's description. Raises UserError for an unknown name, with the nearest known ones."""
    if name not in TASKS:
        near = difflib.get_close_matches(str(name), TASKS, n=3, cutoff=0.4) or list(TASKS)[:3]
        raise UserError(
            f'{name!r} is not the name of a task; the nearest names are {", ".join(near)}: set TASK to one of them'
        )
    return TASKS[name]


def available(name: str, data_dir: str | None = None) -> dict[str, str | None]:
    """For each split of the task the file or TFDS folder that it is read from, None where there is neither."""
    source = find(name).source(data_dir)
    return {split: source.origin(split) for split in source.splits}


def examples(name: str, split: str = TRAIN, n: int = 5, data_dir: str | None = None) -> list[TextExample]:
    """The first `n` examples of a split as text, in the order of the data.

    Raises UserError for an unknown task or split, and for data that is missing or cannot be read.
    """
    found = find(name)
    dataset = found.to_text(found.source(data_dir).get_dataset(split, shuffle=False))
    return [
        TextExample(example['inputs'].decode(), example['targets'].decode())
        for example in itertools.islice(tf_data.arrays(dataset), n)
    ]


def download_folder(data_dir: str | None = None) -> str:
    """The folder that downloads belong in: their `folder` below it is where `sources` looks last."""
    return str(raw_folders(data_dir)[-1])
