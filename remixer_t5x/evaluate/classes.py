"""A classifier's answers as the texts that a text-to-text task's metrics read."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.predictions import Ids, Prediction, Predictor


def is_classifier(model: Any) -> bool:
    """Whether the model gives labels or numbers, and no text."""
    return callable(getattr(model, 'classify', None))


def answers(
    predictor: Predictor, params: Any, inputs: Sequence[Ids], labels: Sequence[str] | None, among: Sequence[str] | None
) -> list[Prediction]:
    """The labels of each text, most likely first, with their log-likelihoods; of a regression the number, as a text.

    Args:
        predictor: of the classifier.
        params: its parameters.
        inputs: ids of each text.
        labels: the classifier's labels, None for a regression.
        among: the labels of a task, all of which the classifier has; None takes all.
    """
    outputs = predictor.classify(params, inputs)
    if labels is None:
        return [Prediction([], [float(value)], [f'{value:.6g}']) for value in outputs[:, 0]]
    chosen = _indices(labels, among)
    names, scores = [labels[index] for index in chosen], outputs[:, chosen]
    order = np.argsort(-scores, axis=1, kind='stable')
    return [
        Prediction([], [float(row[index]) for index in best], [names[index] for index in best])
        for row, best in zip(scores, order, strict=True)
    ]


def target_scores(
    predictor: Predictor, params: Any, inputs: Sequence[Ids], labels: Sequence[str] | None, targets: Sequence[str]
) -> list[float]:
    """log p(target) of each text, for metrics that read it. Raises UserError for a regression or another target."""
    if labels is None:
        raise UserError('a regression gives no likelihoods; give LABELS, or evaluate other tasks')
    chosen = _indices(labels, targets)
    return predictor.classify(params, inputs)[np.arange(len(inputs)), chosen].tolist()


def _indices(labels: Sequence[str], wanted: Sequence[str] | None) -> list[int]:
    missing = [label for label in wanted or () if label not in labels]
    if missing:
        raise UserError(f'LABELS is {tuple(labels)} and the task has the answer {missing[0]!r:.60}; give all of them')
    return [labels.index(label) for label in (labels if wanted is None else wanted)]
