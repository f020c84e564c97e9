"""seqio's metric objects (`metric_objs` of a task), computed as seqio's Evaluator computes them.

Objects get examples and arrays of ids, and decode them; so predictions, which are texts here, become ids again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio


def of(task: seqio.Task) -> list[Any]:
    """The task's own metric objects; seqio lists its metric functions after them."""
    every = list(task.metric_objs)
    return every[: len(every) - len(task.metric_fns)]


def needs_target_scores(task: seqio.Task) -> bool:
    return any(one.model_output_type == seqio.metrics.ModelOutputType.SCORE for one in of(task))


def compute(task: seqio.Task, examples: Sequence[Any], outputs: Any) -> dict[str, Any]:
    """What the objects compute of `task_metrics.Outputs`. Raises UserError for an object that needs activations."""
    found: dict[str, Any] = {}
    for metric in of(task):
        given = _model_output(task, metric.model_output_type, outputs)
        made = metric.from_model_output(examples, given, task.output_features)
        if isinstance(made, seqio.metrics.CollectingMetric):
            values, _ = made.actual_compute(examples, task.output_features)
        else:
            values = made.compute()
        found.update(values)
    return found


def _model_output(task: seqio.Task, kind: Any, outputs: Any) -> Any:
    kinds = seqio.metrics.ModelOutputType
    if kind == kinds.SCORE:
        return np.asarray(outputs.target_scores)
    ids = _ids(task.output_features['targets'].vocabulary, outputs.predictions)
    if kind == kinds.PREDICTION:
        return ids
    if kind == kinds.PREDICTION_WITH_AUX:
        return ids, {'scores': list(outputs.scores)}
    raise UserError(
        f'a metric object of {task.name} asks for {kinds.to_str(kind)}, which is not computed here; use one of '
        'predictions or scores'
    )


def _ids(vocabulary: seqio.Vocabulary, texts: Sequence[str]) -> np.ndarray:
    """[examples, longest] int32, padded with 0."""
    encoded = [vocabulary.encode(text) for text in texts]
    ids: np.ndarray = np.zeros((len(encoded), max([1, *map(len, encoded)])), np.int32)
    for row, tokens in zip(ids, encoded, strict=True):
        row[: len(tokens)] = tokens
    return ids
