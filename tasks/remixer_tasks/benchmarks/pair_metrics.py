"""Metrics of texts by their names, for labelled rows of one's own, and any of them for each value of a column."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks import answer_metrics, answers, class_metrics, generation_metrics
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
    found = class_metrics.mean_f1(len(labels))(
        [ids[label] for label in targets], [ids.get(label, answers.INVALID) for label in predictions]
    )
    return {'macro_f1': next(iter(found.values()))}


def squad(targets: Texts, predictions: Texts) -> Metrics:
    """SQuAD's `em` and `f1` of words, without case, punctuation and articles."""
    return answer_metrics.squad([[target] for target in targets], predictions)


def best_constant_answer(targets: Texts, predictions: Texts) -> Metrics:
    """The accuracy of the most frequent target as every answer, to compare with."""
    del predictions
    return {'best_constant_answer': 100 * max(collections.Counter(targets).values()) / len(targets)}


def regression(targets: Texts, predictions: Texts) -> Metrics:
    """Correlations and `mean_absolute_error` of texts that are numbers; another prediction counts as 0."""
    wanted, found = ([answers.number(text, default=0.0) for text in texts] for texts in (targets, predictions))
    error = float(np.mean(np.abs(np.subtract(wanted, found))))
    correlations = (class_metrics.pearson_corrcoef, class_metrics.spearman_corrcoef)
    return {name: value for metric in correlations for name, value in metric(wanted, found).items()} | {
        'mean_absolute_error': error
    }


NAMED: dict[str, Metric] = {
    'accuracy': class_metrics.accuracy,
    'exact_match': exact_match,
    'macro_f1': macro_f1,
    'best_constant_answer': best_constant_answer,
    'squad': squad,
    'rouge': generation_metrics.rouge,
    'bleu': generation_metrics.bleu,
    'regression': regression,
}


def named(names: Sequence[str] | str) -> list[Metric]:
    """The metrics of these names. Raises UserError for an unknown one, or none."""
    names = [name.strip() for name in names.split(',')] if isinstance(names, str) else list(names)
    unknown = [name for name in names if name not in NAMED]
    if unknown or not names:
        raise UserError(f"METRICS is {names}; it takes some of {', '.join(NAMED)}, as in METRICS = ['accuracy']")
    return [NAMED[name] for name in names]


@dataclasses.dataclass(frozen=True)
class Grouped:
    """What a metric by a column compares: a text, and the value of the column in its row."""

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
    """The metric of all examples, and as NAME/VALUE of those with each value of the column."""

    def grouped(targets: Sequence[Grouped], predictions: Texts) -> Metrics:
        rows: dict[str, tuple[list[str], list[str]]] = {}
        for target, prediction in zip(targets, predictions, strict=True):
            wanted, found = rows.setdefault(target.group, ([], []))
            wanted.append(target.text)
            found.append(prediction)
        values = metric([target.text for target in targets], predictions)
        for group in sorted(rows):
            values |= {f'{name}/{group}': value for name, value in metric(*rows[group]).items()}
        return values

    return grouped
