"""Computes a task's metrics from predictions: its postprocessor, then its metric functions, like seqio's Evaluator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import metric_objects
from remixer_t5x.evaluate.task_examples import TaskExamples
from remixer_t5x.lazy import seqio

Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The outputs of a model for each example of a split, in order.

    `predictions` are texts, `scores` their log-likelihoods; `target_scores` are the log-likelihoods of the true
    targets, needed only if `needs_target_scores`.
    """

    predictions: Sequence[str]
    scores: Sequence[float]
    target_scores: Sequence[float] | None = None


def needs_target_scores(task: seqio.Task) -> bool:
    return bool(task.score_metric_fns) or metric_objects.needs_target_scores(task)


def compute(examples: TaskExamples, outputs: Outputs) -> Metrics:
    """Every number from the task's metric functions and then its metric objects, in their order.

    Results that are not numbers are left out.

    Raises UserError if the numbers of outputs and examples differ.
    """
    task, count = examples.task, len(examples.examples)
    if len(outputs.predictions) != count:
        raise UserError(
            f'{len(outputs.predictions):,} predictions do not match {task.name}, split {examples.split}, which has '
            f'{count:,} examples; give the predictions of this split'
        )
    targets = _postprocessed(examples, examples.texts('targets'), is_target=True)
    found: dict[str, Any] = {}
    if task.predict_metric_fns or task.predict_with_aux_metric_fns:
        predictions = _postprocessed(examples, outputs.predictions, is_target=False)
        for metric in task.predict_metric_fns:
            found.update(metric(targets, predictions))
        for metric in task.predict_with_aux_metric_fns:
            found.update(metric(targets, predictions, {'scores': list(outputs.scores)}))
    for metric in task.score_metric_fns:
        found.update(metric(targets, outputs.target_scores))
    found.update(metric_objects.compute(task, examples.examples, outputs))
    return {name: number for name, value in found.items() if (number := _number(value)) is not None}


def _postprocessed(examples: TaskExamples, texts: Sequence[str], is_target: bool) -> list[Any]:
    postprocess = examples.task.postprocess_fn
    pairs = zip(texts, examples.examples, strict=True)
    return [postprocess(text, example=example, is_target=is_target) for text, example in pairs]


def _number(value: Any) -> float | None:
    value = getattr(value, 'value', value)
    return float(value) if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number) else None


def describe(metrics: Mapping[str, float], most: int = 3) -> str:
    """accuracy 55.20, f1 48.11; the values of groups follow their metric: accuracy 55.20 (easy 60.40, hard 50.00)"""
    groups: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        metric, _, group = name.partition('/')
        if metric in metrics and group:
            groups[metric][group] = value
        else:
            groups[name] = {}
    shown = [f'{name} {metrics[name]:.2f}' + (f' ({describe(of)})' if of else '') for name, of in groups.items()]
    return ', '.join(shown[:most]) + (f' and {len(shown) - most} more' if len(shown) > most else '')
