"""Metrics of classification and regression, in percent: seqio metric functions (targets, predictions) -> {name: value}.

Targets and predictions are class ids (or numbers); INVALID, a text that is not a label, is always wrong. If the labels
of a split are not public, every target is INVALID and there is no metric.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import scipy.stats

from remixer_tasks.benchmarks.answers import INVALID

Metrics = dict[str, float]
Metric = Callable[[Sequence[Any], Sequence[Any]], Metrics]


def check_lengths(targets: Sequence[Any], predictions: Sequence[Any]) -> None:
    """Raises ValueError for lists of unequal length."""
    if len(targets) != len(predictions):
        raise ValueError(f'{len(targets)} targets and {len(predictions)} predictions do not match')


def labelled(metric: Metric) -> Metric:
    """`metric`, which becomes empty if no target has a label."""

    @functools.wraps(metric)
    def of_labelled(targets: Sequence[Any], predictions: Sequence[Any]) -> Metrics:
        check_lengths(targets, predictions)
        if all(target == INVALID for target in targets):
            return {}
        return metric(targets, predictions)

    return of_labelled


@labelled
def accuracy(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> Metrics:
    """Share of predictions equal to their targets."""
    return {'accuracy': 100 * float(np.mean([a == b for a, b in zip(targets, predictions, strict=True)]))}


@labelled
def f1(targets: Sequence[int], predictions: Sequence[int]) -> Metrics:
    """F1 of class 1 of two; an INVALID prediction counts as the class that the target is not."""
    target, predicted = np.asarray(targets), np.asarray(predictions)
    predicted = np.where((predicted == 0) | (predicted == 1), predicted, 1 - target)
    return {'f1': 100 * _f1_of_class(target, predicted, 1)}


def mean_f1(classes: int) -> Metric:
    """The mean over `classes` of the F1 of each, as for CB."""

    @labelled
    def mean_class_f1(targets: Sequence[int], predictions: Sequence[int]) -> Metrics:
        target, predicted = np.asarray(targets), np.asarray(predictions)
        values = [_f1_of_class(target, predicted, label) for label in range(classes)]
        return {f'mean_{classes}class_f1': 100 * float(np.mean(values))}

    return mean_class_f1


@labelled
def matthews_corrcoef(targets: Sequence[int], predictions: Sequence[int]) -> Metrics:
    """Matthews' correlation of two or more classes (Gorodkin 2004); INVALID is a class of its own, 0 if undefined."""
    target, predicted = np.asarray(targets), np.asarray(predictions)
    labels = np.union1d(target, predicted)
    one_hot, one_hot_predicted = (values[:, None] == labels for values in (target, predicted))
    agreed = float(np.sum(one_hot & one_hot_predicted))
    counts, predicted_counts = one_hot.sum(0).astype(float), one_hot_predicted.sum(0).astype(float)
    total = float(len(target))
    covariance = agreed * total - counts @ predicted_counts
    spread = (total**2 - counts @ counts) * (total**2 - predicted_counts @ predicted_counts)
    return {'matthews_corrcoef': 100 * float(covariance / np.sqrt(spread)) if spread else 0.0}


@labelled
def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> Metrics:
    """Pearson's correlation, 0 if one side is constant."""
    return {'pearson_corrcoef': 100 * _correlation(scipy.stats.pearsonr, targets, predictions)}


@labelled
def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> Metrics:
    """Pearson's correlation of ranks, in which equal values share their mean rank; 0 if one side is constant."""
    return {'spearman_corrcoef': 100 * _correlation(scipy.stats.spearmanr, targets, predictions)}


def _f1_of_class(target: np.ndarray, predicted: np.ndarray, label: int) -> float:
    right = float(np.sum((target == label) & (predicted == label)))
    named = float(np.sum(target == label) + np.sum(predicted == label))
    return 2 * right / named if named else 0.0


def _correlation(function: Callable[..., Any], targets: Sequence[float], predictions: Sequence[float]) -> float:
    # SciPy warns and returns NaN if one side is constant.
    if not np.ptp(targets) or not np.ptp(predictions):
        return 0.0
    return float(function(np.asarray(targets, float), np.asarray(predictions, float)).statistic)
