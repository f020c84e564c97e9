"""Metrics of free-text answers, in percent: SQuAD's exact match and F1, and how MultiRC and ReCoRD group examples."""

import collections
import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from remixer_tasks.benchmarks import class_metrics
from remixer_tasks.benchmarks.answers import INVALID
from remixer_tasks.benchmarks.class_metrics import Metrics

_PUNCTUATION = str.maketrans('', '', string.punctuation)


def normalize(answer: str) -> str:
    """Lower case, without ASCII punctuation, the articles a, an and the, and superfluous white space."""
    return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', answer.lower().translate(_PUNCTUATION)).split())


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> Metrics:
    """`em` and `f1`: for each question the best over its right answers. Nothing where no question has an answer."""
    if len(targets) != len(predictions):
        raise ValueError(f'{len(targets)} questions and {len(predictions)} predictions do not match')
    if not any(targets):
        return {}
    scores = [_best(answers, text) for answers, text in zip(targets, predictions, strict=True)]
    em, f1 = np.mean(scores, axis=0)
    return {'em': 100 * float(em), 'f1': 100 * float(f1)}


def squad_2(unanswerable: str) -> class_metrics.Metric:
    """SQuAD 2.0's `em`, `f1`, and each of them over the questions with and without an answer (`HasAns_`, `NoAns_`).

    unanswerable: the text that stands for no answer, in targets and in predictions.
    """

    def squad_with_unanswerable(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> Metrics:
        if len(targets) != len(predictions):
            raise ValueError(f'{len(targets)} questions and {len(predictions)} predictions do not match')
        nothing = normalize(unanswerable)
        has_answer = np.array([all(normalize(text) != nothing for text in answers) for answers in targets])
        scores = np.array([_best(answers, text) for answers, text in zip(targets, predictions, strict=True)])
        found: Metrics = {}
        for prefix, of in (('', has_answer | ~has_answer), ('HasAns_', has_answer), ('NoAns_', ~has_answer)):
            if of.any():
                em, f1 = scores[of].mean(axis=0)
                found.update({f'{prefix}em': 100 * float(em), f'{prefix}f1': 100 * float(f1)})
        return found

    return squad_with_unanswerable


def record(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """ReCoRD: SQuAD's metrics over the first example of each query: the data repeat a query for each answer."""
    first: dict[Any, tuple[Sequence[str], str]] = {}
    for target, prediction in zip(targets, predictions, strict=True):
        first.setdefault(target['group'], (target['value'], prediction['value']))
    return squad([value for value, _ in first.values()], [text for _, text in first.values()])


def multirc_f1(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """MultiRC's F1a: F1 of 'True' over all answers of all questions."""
    return class_metrics.f1([target['value'] for target in targets], [found['value'] for found in predictions])


def multirc_exact_match(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """Share of MultiRC's questions whose answers are all judged right."""
    if all(target['value'] == INVALID for target in targets):
        return {}
    right: dict[Any, bool] = collections.defaultdict(lambda: True)
    for target, prediction in zip(targets, predictions, strict=True):
        right[target['group']] &= target['value'] == prediction['value']
    return {'exact_match': 100 * float(np.mean(list(right.values())))}


def _best(answers: Sequence[str], prediction: str) -> tuple[float, float]:
    """(exact match, F1) against the answer that gives most, each for itself."""
    text = normalize(prediction)
    normalized = [normalize(answer) for answer in answers]
    return (
        float(any(answer == text for answer in normalized)),
        max((_overlap(answer.split(), text.split()) for answer in normalized), default=0.0),
    )


def _overlap(answer: list[str], prediction: list[str]) -> float:
    """F1 of two bags of words; 0 where one is empty."""
    common = sum((collections.Counter(answer) & collections.Counter(prediction)).values())
    return 2 * common / (len(answer) + len(prediction)) if common else 0.0
