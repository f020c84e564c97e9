"""`remixer-t5x eval --predictions`: a file of predictions judged by the metrics of a task, without a model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from remixer_t5x.errors import UserError
from remixer_t5x.evaluation import results, task_examples, task_metrics
from remixer_t5x.evaluation.task_examples import Provider, TaskExamples


def run(
    mixture_or_task: Provider,
    feature_lengths: Mapping[str, int],
    predictions: str,
    split: str,
    task: str | None = None,
    limit: int | None = None,
) -> None:
    """Prints the task's metrics.

    Args:
        mixture_or_task: one task, or a mixture.
        feature_lengths: `inputs` and `targets` in tokens, which the task's preprocessors ask for.
        predictions: JSON lines with a text `prediction`, one for each example of the split and in its order, as
            `remixer-t5x eval` and `infer` write them; where a line has `input` too, it must be the example's.
        split: of the task.
        task: the name of the task, if there is a mixture.
        limit: of examples, as the predictions were made with; None for all.

    Raises UserError for a file that does not match the split, and a task that cannot be read.
    """
    tasks, _ = task_examples.tasks_of(mixture_or_task, split, task)
    if len(tasks) > 1:
        names = ', '.join(task.name for task in tasks)
        raise UserError(f'{predictions} can be of one task, and these are {names}; give one with --task')
    if task_metrics.needs_target_scores(tasks[0]):
        raise UserError(f'{tasks[0].name} is judged by likelihoods, which the file lacks; give a checkpoint')
    examples = task_examples.read(tasks[0], split, feature_lengths, limit)
    rows = results.read_predictions(predictions)
    _check_inputs(examples, rows, predictions)
    scores = [row.get('score') or 0.0 for row in rows]
    found = task_metrics.compute(examples, task_metrics.Outputs([row['prediction'] for row in rows], scores))
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False)
    console.print(f'{tasks[0].name}, {split}, {len(rows):,} predictions of {predictions}')
    for name, value in found.items():
        console.print(f'  {name:<24} {value:.2f}')


def _check_inputs(examples: TaskExamples, rows: Sequence[Mapping[str, Any]], path: str) -> None:
    for number, (row, text) in enumerate(zip(rows, examples.texts('inputs'), strict=False), 1):
        if row.get('input', text) != text:
            raise UserError(
                f'{path} line {number} does not match {examples.task.name}, split {examples.split}: '
                f'its input is {row["input"][:40]!r}, and that of the example {text[:40]!r}'
            )
