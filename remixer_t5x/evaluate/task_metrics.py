"""Computes a task's metrics from predictions, like seqio's Evaluator: postprocessor, metric functions and objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
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
    """Returns whether a metric of the task reads the scores of the true targets."""
    kind = seqio.metrics.ModelOutputType.SCORE
    return bool(task.score_metric_fns) or any(each.model_output_type == kind for each in _metric_objects(task))


def compute(examples: TaskExamples, outputs: Outputs) -> Metrics:
    """Computes the task's metric functions and then its metric objects, in their order; keeps only numbers.

    Raises UserError if the numbers of outputs and examples differ.
    """
    task, count = examples.task, len(examples.examples)
    if len(outputs.predictions) != count:
        raise UserError(
            f'{len(outputs.predictions):,} predictions do not match {task.name}, split {examples.split}, which has '
            f'{count:,} examples; give the predictions of this split'
        )
    targets = _postprocessed(examples, examples.texts('targets'), is_target=True)
    metrics: dict[str, Any] = {}
    if task.predict_metric_fns or task.predict_with_aux_metric_fns:
        predictions = _postprocessed(examples, outputs.predictions, is_target=False)
        for metric in task.predict_metric_fns:
            metrics.update(metric(targets, predictions))
        for metric in task.predict_with_aux_metric_fns:
            metrics.update(metric(targets, predictions, {'scores': list(outputs.scores)}))
    for metric in task.score_metric_fns:
        metrics.update(metric(targets, outputs.target_scores))
    metrics.update(_compute_objects(task, examples.examples, outputs))
    return {name: number for name, value in metrics.items() if (number := _number(value)) is not None}


def _postprocessed(examples: TaskExamples, texts: Sequence[str], is_target: bool) -> list[Any]:
    postprocess = examples.task.postprocess_fn
    pairs = zip(texts, examples.examples, strict=True)
    return [postprocess(text, example=example, is_target=is_target) for text, example in pairs]


def _number(value: Any) -> float | None:
    value = getattr(value, 'value', value)
    return float(value) if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number) else None


def describe(metrics: Mapping[str, float], most: int = 3) -> str:
    """Formats metrics as `accuracy 55.20, f1 48.11`, with groups after their metric: `accuracy 55.20 (easy 60.40)`."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        metric, _, group = name.partition('/')
        if metric in metrics and group:
            groups[metric][group] = value
        else:
            groups[name] = {}
    shown = [f'{name} {metrics[name]:.2f}' + (f' ({describe(of)})' if of else '') for name, of in groups.items()]
    return ', '.join(shown[:most]) + (f' and {len(shown) - most} more' if len(shown) > most else '')


def _metric_objects(task: seqio.Task) -> list[Any]:
    """Returns `metric_objs` without the metric functions, which seqio appends to them."""
    return list(task.metric_objs)[: len(task.metric_objs) - len(task.metric_fns)]


def _compute_objects(task: seqio.Task, examples: Sequence[Any], outputs: Outputs) -> dict[str, Any]:
    """Computes the task's metric objects as seqio's Evaluator does.

    Objects get examples and arrays of ids, and decode them; so predictions, which are texts here, become ids again.
    Raises UserError for an object that needs activations.
    """
    metrics: dict[str, Any] = {}
    for metric in _metric_objects(task):
        model_output = _model_output(task, metric.model_output_type, outputs)
        state = metric.from_model_output(examples, model_output, task.output_features)
        if isinstance(state, seqio.metrics.CollectingMetric):
            values, _ = state.actual_compute(examples, task.output_features)
        else:
            values = state.compute()
        metrics.update(values)
    return metrics


def _model_output(task: seqio.Task, kind: Any, outputs: Outputs) -> Any:
    kinds = seqio.metrics.ModelOutputType
    if kind == kinds.SCORE:
        return np.asarray(outputs.target_scores)
    ids = _ids(task.output_features['targets'].vocabulary, outputs.predictions)
    if kind == kinds.PREDICTION:
        return ids
    if kind == kinds.PREDICTION_WITH_AUX:
        return ids, {'scores': list(outputs.scores)}
    raise UserError(
        f'a metric object of {task.name} needs {kinds.to_str(kind)}, which is not computed; use a metric of '
        'predictions or scores'
    )


def _ids(vocabulary: seqio.Vocabulary, texts: Sequence[str]) -> np.ndarray:
    """Encodes texts as [examples, longest] int32, padded with 0."""
    encoded = [vocabulary.encode(text) for text in texts]
    ids: np.ndarray = np.zeros((len(encoded), max([1, *map(len, encoded)])), np.int32)
    for row, tokens in zip(ids, encoded, strict=True):
        row[: len(tokens)] = tokens
    return ids
