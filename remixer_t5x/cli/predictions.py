"""`remixer-t5x eval --predictions`: judges a file of predictions by the metrics of a task, without a model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from remixer_t5x.cli import arguments
from remixer_t5x.errors import UserError

if TYPE_CHECKING:
    from remixer_t5x.evaluate.task_examples import TaskExamples

_MACROS = ('MIXTURE_OR_TASK_NAME', 'TASK_FEATURE_LENGTHS', 'EVAL_SPLIT', 'EVAL_TASKS', 'EVAL_EXAMPLES')


def score(args: argparse.Namespace, base: Sequence[str]) -> None:
    """Prints the task's metrics.

    `args.predictions` names JSON lines with a text `prediction`, one for each example of the split and in its order, as
    `remixer-t5x eval` and `infer` write them; where a line has `input` too, it must be the example's.

    Raises:
        UserError: the file does not match the split, or a task cannot be read.
    """
    mixture, lengths, split, name, limit = arguments.values(args, *_MACROS, base=base)
    from remixer_t5x.evaluate import results, task_examples, task_metrics

    path = args.predictions
    tasks, _ = task_examples.find_tasks(mixture, split, name)
    if len(tasks) > 1:
        names = ', '.join(task.name for task in tasks)
        raise UserError(f'{path} can be of one task, and these are {names}; give one with --task')
    if task_metrics.needs_target_scores(tasks[0]):
        raise UserError(f'{tasks[0].name} is judged by likelihoods, which the file lacks; give a checkpoint')
    examples = task_examples.read(tasks[0], split, lengths, limit)
    rows = results.read_predictions(path)
    _check_inputs(examples, rows, path)
    scores = [row.get('score') or 0.0 for row in rows]
    found = task_metrics.compute(examples, task_metrics.Outputs([row['prediction'] for row in rows], scores))
    print(f'{tasks[0].name}, {split}, {len(rows):,} predictions of {path}')
    for metric, value in found.items():
        print(f'  {metric:<24} {value:.2f}')


def _check_inputs(examples: TaskExamples, rows: Sequence[Mapping[str, Any]], path: str) -> None:
    for number, (row, text) in enumerate(zip(rows, examples.texts('inputs'), strict=False), 1):
        if row.get('input', text) != text:
            raise UserError(
                f'{path} line {number} does not match {examples.task.name}, split {examples.split}: '
                f'its input is {row["input"][:40]!r}, and the input of the example is {text[:40]!r}'
            )
