"""Metrics of texts by name, for a user's labelled rows, and each of them per value of a column."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks import answers, class_metrics, text_metrics
from remixer_tasks.benchmarks.class_metrics import Metric, Metrics

Texts = Sequence[str]


def exact_match(targets: Texts, predictions: Texts) -> Metrics:
    """Share of predictions equal to their targets, but for white space."""
    pairs = zip(targets, predictions, strict=True)
    return {'exact_match': 100 * float(np.mean([a.split() == b.split() for a, b in pairs]))}


def macro_f1(targets: Texts, predictions: Texts) -> Metrics:
    """The mean over the targets' labels of the F1 of each."""
    labels = sorted(set(targets))
    ids = {label: index for index, label in enumerate(labels)}
    predicted = [ids.get(label, answers.INVALID) for label in predictions]
    (mean,) = class_metrics.mean_f1(len(labels))([ids[label] for label in targets], predicted).values()
    return {'macro_f1': mean}


def squad(targets: Texts, predictions: Texts) -> Metrics:
    """SQuAD's `em` and `f1` of words, without case, punctuation and articles."""
    return text_metrics.squad([[target] for target in targets], predictions)


def best_constant_answer(targets: Texts, predictions: Texts) -> Metrics:
    """A baseline: the accuracy of the most frequent target as every answer."""
    del predictions
    return {'best_constant_answer': 100 * max(collections.Counter(targets).values()) / len(targets)}


def regression(targets: Texts, predictions: Texts) -> Metrics:
    """Correlations and `mean_absolute_error` of texts that are numbers; another prediction counts as 0."""
    numbers, predicted = ([answers.number(text, default=0.0) for text in texts] for texts in (targets, predictions))
    return {
        **class_metrics.pearson_corrcoef(numbers, predicted),
        **class_metrics.spearman_corrcoef(numbers, predicted),
        'mean_absolute_error': float(np.mean(np.abs(np.subtract(numbers, predicted)))),
    }


NAMED: dict[str, Metric] = {
    'accuracy': class_metrics.accuracy,
    'exact_match': exact_match,
    'macro_f1': macro_f1,
    'best_constant_answer': best_constant_answer,
    'squad': squad,
    'rouge': text_metrics.rouge,
    'bleu': text_metrics.bleu,
    'regression': regression,
}


def named(names: Sequence[str] | str) -> list[Metric]:
    """The metrics of these names. Raises UserError for an unknown name or an empty list."""
    names = [name.strip() for name in names.split(',')] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in NAMED]
    if unknown or not names:
        raise UserError(f"METRICS must be some of {', '.join(NAMED)}, got {names}; type METRICS = ['accuracy']")
    return [NAMED[name] for name in names]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A target text and the value of the METRICS_BY column in its row."""

    text: str
    group: str


def keep_group(column: str) -> Callable[..., Any]:
    """A seqio postprocessor: targets become `Grouped`, predictions stay texts."""

    def postprocess(text: str, example: dict[str, Any] | None = None, is_target: bool = False) -> Any:
        if not is_target or example is None:
            return text
        return Grouped(text, example[column].decode())

    return postprocess


def by_group(metric: Metric) -> Metric:
    """The metric of all examples, and NAME/VALUE, the metric of the examples with each value of the column."""

    def grouped(targets: Sequence[Grouped], predictions: Texts) -> Metrics:
        rows: dict[str, tuple[list[str], list[str]]] = {}
        for target, prediction in zip(targets, predictions, strict=True):
            texts, predicted = rows.setdefault(target.group, ([], []))
            texts.append(target.text)
            predicted.append(prediction)
        values = metric([target.text for target in targets], predictions)
        for group in sorted(rows):
            values |= {f'{name}/{group}': value for name, value in metric(*rows[group]).items()}
        return values

    return grouped
