"""Computes task metrics as seqio's Evaluator does: with a task's postprocessor, metric functions and metric objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.predictions import pad_ids
from remixer_t5x.evaluate.task_examples import TaskExamples
from remixer_t5x.lazy import seqio

Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class ModelOutputs:
    """The outputs of a model for each example of a split, in order.

    `predictions` contains texts, and `scores` their log-likelihoods. `target_scores` contains the log-likelihoods of
    the targets and is set only if `needs_target_scores` returns true for the task.
    """

    predictions: Sequence[str]
    scores: Sequence[float]
    target_scores: Sequence[float] | None = None


def needs_target_scores(task: seqio.Task) -> bool:
    """Returns whether a metric of the task uses the log-likelihoods of the targets."""
    kind = seqio.metrics.ModelOutputType.SCORE
    return bool(task.score_metric_fns) or any(each.model_output_type == kind for each in _metric_objects(task))


def compute_metrics(examples: TaskExamples, outputs: ModelOutputs) -> Metrics:
    """Evaluates the task's metric functions and then its metric objects. Returns only metrics that are numbers.

    Raises UserError if the number of outputs differs from the number of examples.
    """
    task, count = examples.task, len(examples.examples)
    if len(outputs.predictions) != count:
        raise UserError(
            f'predictions of {task.name}, split {examples.split}, must have {count:,} rows, got '
            f'{len(outputs.predictions):,}; use the predictions of this split'
        )

    def postprocess(texts: Sequence[str], is_target: bool) -> list[Any]:
        pairs = zip(texts, examples.examples, strict=True)
        return [task.postprocess_fn(text, example=example, is_target=is_target) for text, example in pairs]

    targets = postprocess(examples.texts('targets'), is_target=True)
    metrics: dict[str, Any] = {}
    if task.predict_metric_fns or task.predict_with_aux_metric_fns:
        predictions = postprocess(outputs.predictions, is_target=False)
        for metric in task.predict_metric_fns:
            metrics.update(metric(targets, predictions))
        for metric in task.predict_with_aux_metric_fns:
            metrics.update(metric(targets, predictions, {'scores': list(outputs.scores)}))
    for metric in task.score_metric_fns:
        metrics.update(metric(targets, outputs.target_scores))
    metrics.update(_compute_metric_objects(task, examples.examples, outputs))
    arrays = {name: np.asarray(getattr(value, 'value', value)) for name, value in metrics.items()}
    return {name: float(x) for name, x in arrays.items() if x.ndim == 0 and np.issubdtype(x.dtype, np.number)}


def format_metrics(metrics: Mapping[str, float], most: int = 3) -> str:
    """Formats metrics as in `accuracy 55.20 (easy 60.40), f1 48.11`, where 60.40 is the metric `accuracy/easy`."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        metric, _, group = name.partition('/')
        if metric in metrics and group:
            groups[metric][group] = value
        else:
            groups[name] = {}
    shown = [f'{name} {metrics[name]:.2f}' + (f' ({format_metrics(of)})' if of else '') for name, of in groups.items()]
    return ', '.join(shown[:most]) + (f' and {len(shown) - most} more' if len(shown) > most else '')


def _metric_objects(task: seqio.Task) -> list[Any]:
    """Returns the task's metric objects, without the metric functions that seqio appends to them."""
    return list(task.metric_objs)[: len(task.metric_objs) - len(task.metric_fns)]


def _compute_metric_objects(task: seqio.Task, examples: Sequence[Any], outputs: ModelOutputs) -> dict[str, Any]:
    """Evaluates the task's metric objects as seqio's Evaluator does.

    Metric objects require token ids, so the predicted texts are encoded again. Raises UserError for a metric object
    that requires activations.
    """
    objects = _metric_objects(task)
    encoded = [task.output_features['targets'].vocabulary.encode(text) for text in outputs.predictions if objects]
    ids = pad_ids(encoded, max([1, *map(len, encoded)]))
    kinds = seqio.metrics.ModelOutputType
    model_outputs = {
        kinds.SCORE: np.asarray(outputs.target_scores),
        kinds.PREDICTION: ids,
        kinds.PREDICTION_WITH_AUX: (ids, {'scores': list(outputs.scores)}),
    }
    metrics: dict[str, Any] = {}
    for metric in objects:
        kind = metric.model_output_type
        if kind not in model_outputs:
            raise UserError(f'the metrics of {task.name} must use predictions or scores, got {kinds.to_str(kind)}')
        state = metric.from_model_output(examples, model_outputs[kind], task.output_features)
        if isinstance(state, seqio.metrics.CollectingMetric):
            values, _ = state.actual_compute(examples, task.output_features)
        else:
            values = state.compute()
        metrics.update(values)
    return metrics
