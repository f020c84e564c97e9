"""seqio metric functions, which map (targets, predictions) to {name: value in percent}.

Classification metrics compare class ids. A prediction that is not a label has the id INVALID, which differs from the
ids of all labels. If the labels of a split are not public, all targets are INVALID and metrics are empty. BLEU and
ROUGE use T5's settings. `METRICS_BY_NAME` contains the metrics that users can select for their own data; these compare
texts.
"""

import collections
import functools
import itertools
import json
import math
import re
import string
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import scipy.stats

from remixer_t5x.errors import UserError, import_optional
from remixer_tasks.benchmarks import prompts
from remixer_tasks.benchmarks.prompts import INVALID
from remixer_tasks.benchmarks.text_task import Metric

Metrics = dict[str, float]
Texts = Sequence[str]
_PUNCTUATION = str.maketrans('', '', string.punctuation)
# Stands for 'no answer' when word F1 is computed, because word F1 is undefined for texts without words.
_NO_ANSWER = '\ue000'
ROUGE = ('rouge1', 'rouge2', 'rougeLsum')


def skip_unlabelled(metric: Metric) -> Metric:
    """Wraps `metric` to return {} if no target has a label."""

    @functools.wraps(metric)
    def checked_metric(targets: Sequence[Any], predictions: Sequence[Any]) -> Metrics:
        return {} if all(target == INVALID for target in targets) else metric(targets, predictions)

    return checked_metric


@skip_unlabelled
def accuracy(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> Metrics:
    """Computes the percentage of predictions that equal their targets."""
    return {'accuracy': 100 * float(np.mean([a == b for a, b in zip(targets, predictions, strict=True)]))}


@skip_unlabelled
def f1(targets: Sequence[int], predictions: Sequence[int]) -> Metrics:
    """Computes F1 of class 1 in binary classification; an INVALID prediction counts as the wrong class."""
    target, predicted = np.asarray(targets), np.asarray(predictions)
    predicted = np.where((predicted == 0) | (predicted == 1), predicted, 1 - target)
    return {'f1': 100 * _compute_class_f1(target, predicted, 1)}


def build_mean_f1_metric(classes: int) -> Metric:
    """Returns a metric that computes the mean F1 over `classes` classes, as in CB."""

    @skip_unlabelled
    def mean_class_f1(targets: Sequence[int], predictions: Sequence[int]) -> Metrics:
        target, predicted = np.asarray(targets), np.asarray(predictions)
        values = [_compute_class_f1(target, predicted, label) for label in range(classes)]
        return {f'mean_{classes}class_f1': 100 * float(np.mean(values))}

    return mean_class_f1


def _compute_class_f1(target: np.ndarray, predicted: np.ndarray, label: int) -> float:
    right = float(np.sum((target == label) & (predicted == label)))
    total = float(np.sum(target == label) + np.sum(predicted == label))
    return 2 * right / total if total else 0.0


@skip_unlabelled
def matthews_corrcoef(targets: Sequence[int], predictions: Sequence[int]) -> Metrics:
    """Computes the Matthews correlation of two or more classes (Gorodkin 2004), with INVALID as an extra class."""
    target, predicted = np.asarray(targets), np.asarray(predictions)
    labels = np.union1d(target, predicted)
    one_hot, one_hot_predicted = (values[:, None] == labels for values in (target, predicted))
    agreed = float(np.sum(one_hot & one_hot_predicted))
    counts, predicted_counts = one_hot.sum(0).astype(float), one_hot_predicted.sum(0).astype(float)
    total = float(len(target))
    covariance = agreed * total - counts @ predicted_counts
    spread = (total**2 - counts @ counts) * (total**2 - predicted_counts @ predicted_counts)
    return {'matthews_corrcoef': 100 * float(covariance / np.sqrt(spread)) if spread else 0.0}


@skip_unlabelled
def pearson_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> Metrics:
    """Computes the Pearson correlation; returns 0 if the targets or the predictions are constant."""
    return {'pearson_corrcoef': 100 * _compute_correlation(scipy.stats.pearsonr, targets, predictions)}


@skip_unlabelled
def spearman_corrcoef(targets: Sequence[float], predictions: Sequence[float]) -> Metrics:
    """Computes the Spearman correlation, with mean ranks for ties; returns 0 for constant targets or predictions."""
    return {'spearman_corrcoef': 100 * _compute_correlation(scipy.stats.spearmanr, targets, predictions)}


def _compute_correlation(function: Callable[..., Any], targets: Sequence[float], predictions: Sequence[float]) -> float:
    # SciPy warns and returns NaN for constant values.
    if not np.ptp(targets) or not np.ptp(predictions):
        return 0.0
    return float(function(np.asarray(targets, float), np.asarray(predictions, float)).statistic)


def normalize_answer(answer: str) -> str:
    """Lower-cases an answer and removes ASCII punctuation, the articles a, an and the, and repeated white space."""
    return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', answer.lower().translate(_PUNCTUATION)).split())


def squad_em_and_f1(targets: Sequence[Texts], predictions: Texts) -> Metrics:
    """Computes exact match and word F1 with the best answer to each question; returns {} if there are no answers."""
    return _average_em_and_f1(_score_answers(targets, predictions)) if any(targets) else {}


def _score_answers(targets: Sequence[Texts], predictions: Texts) -> np.ndarray:
    """Returns the maximum exact match and word F1 over the answers to each question, as an array [questions, 2]."""
    scores = []
    for answers, prediction in zip(targets, predictions, strict=True):
        text, normalized = normalize_answer(prediction), [normalize_answer(answer) for answer in answers]
        f1 = max((_compute_word_f1(answer.split(), text.split()) for answer in normalized), default=0.0)
        scores.append((text in normalized, f1))
    return np.array(scores, float)


def _compute_word_f1(answer: list[str], prediction: list[str]) -> float:
    common = sum((collections.Counter(answer) & collections.Counter(prediction)).values())
    return 2 * common / (len(answer) + len(prediction)) if common else 0.0


def _average_em_and_f1(scores: np.ndarray) -> Metrics:
    em, f1 = scores.mean(axis=0)
    return {'em': 100 * float(em), 'f1': 100 * float(f1)}


def record_em_and_f1(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """Computes SQuAD's metrics over ReCoRD's queries, each of which is repeated for every answer but counted once."""
    first: dict[Any, tuple[Texts, str]] = {}
    for target, prediction in zip(targets, predictions, strict=True):
        first.setdefault(target['group'], (target['value'], prediction['value']))
    return squad_em_and_f1([value for value, _ in first.values()], [text for _, text in first.values()])


def multirc_f1(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """Computes MultiRC's F1a: F1 of 'True' over all answers to all questions."""
    return f1([target['value'] for target in targets], [prediction['value'] for prediction in predictions])


def multirc_exact_match(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """Computes the percentage of MultiRC's questions for which all answers are classified correctly."""
    if all(target['value'] == INVALID for target in targets):
        return {}
    right: dict[Any, bool] = collections.defaultdict(lambda: True)
    for target, prediction in zip(targets, predictions, strict=True):
        right[target['group']] &= target['value'] == prediction['value']
    return {'exact_match': 100 * float(np.mean(list(right.values())))}


def bleu(targets: Texts | Sequence[Texts], predictions: Texts) -> Metrics:
    """Computes sacrebleu's corpus BLEU with the `intl` tokenizer; a target is one reference or a list of them."""
    if not targets:
        return {}
    # sacrebleu expects one list per reference, not per example.
    references = [list(targets)] if isinstance(targets[0], str) else [list(each) for each in zip(*targets, strict=True)]
    score = import_optional('sacrebleu', 'BLEU', 'generation').corpus_bleu(
        list(predictions), references, smooth_method='exp', smooth_value=0.0, tokenize='intl'
    )
    return {'bleu': float(score.score)}


def rouge(targets: Texts, predictions: Texts) -> Metrics:
    """Computes the mean F-measure of `rouge1`, `rouge2` and `rougeLsum` over the examples, without stemming.

    T5 reports the median of bootstrap samples of this mean, so its values vary randomly in the second decimal.
    """
    if not targets:
        return {}
    scorer = import_optional('rouge_score.rouge_scorer', 'ROUGE', 'generation').RougeScorer(ROUGE)
    pairs = zip(targets, predictions, strict=True)
    # rougeLsum expects one sentence per line.
    scores = [scorer.score(*(text.replace(' . ', ' .\n') for text in pair)) for pair in pairs]
    return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}


def exact_match(targets: Texts, predictions: Texts) -> Metrics:
    """Computes the percentage of predictions that equal their targets, ignoring white space."""
    pairs = zip(targets, predictions, strict=True)
    return {'exact_match': 100 * float(np.mean([a.split() == b.split() for a, b in pairs]))}


def macro_f1(targets: Texts, predictions: Texts) -> Metrics:
    """Computes the mean F1 of the labels that occur in the targets."""
    labels = sorted(set(targets))
    ids = {label: index for index, label in enumerate(labels)}
    predicted = [ids.get(label, INVALID) for label in predictions]
    (mean,) = build_mean_f1_metric(len(labels))([ids[label] for label in targets], predicted).values()
    return {'macro_f1': mean}


def best_constant_prediction(targets: Texts, predictions: Texts) -> Metrics:
    """Computes the accuracy of always predicting the most frequent target among the evaluated examples."""
    del predictions
    return {'best_constant_prediction': 100 * max(collections.Counter(targets).values()) / len(targets)}


def regression_metrics(targets: Texts, predictions: Texts) -> Metrics:
    """Computes the correlations and the mean absolute error of numbers; a non-numeric prediction counts as 0."""
    numbers = [prompts.parse_number(text, default=math.nan) for text in targets]
    for text, number in zip(targets, numbers, strict=True):
        if math.isnan(number):
            raise UserError(
                f'targets of the metric regression must be numbers such as 3.5, got {text!r:.60}; correct the data, or '
                "set METRICS = ['accuracy']"
            )
    predicted = [prompts.parse_number(text, default=0.0) for text in predictions]
    # Unlike `pearson_corrcoef`, the target -1 is a number, not a missing label.
    return {
        'pearson_corrcoef': 100 * _compute_correlation(scipy.stats.pearsonr, numbers, predicted),
        'spearman_corrcoef': 100 * _compute_correlation(scipy.stats.spearmanr, numbers, predicted),
        'mean_absolute_error': float(np.mean(np.abs(np.subtract(numbers, predicted)))),
    }


def entity_f1(targets: Texts, predictions: Texts) -> Metrics:
    """Computes the precision, recall and F1 of entities, and the tag accuracy, from strings with one tag per word.

    As in seqeval's default mode, an entity begins at a B- or S- tag, after an O, E- or S- tag, or when the type
    changes.
    """
    correct, num_predicted, num_targets, tags = 0, 0, 0, []
    for pair in zip(targets, predictions, strict=True):
        target, prediction = (text.split() for text in pair)
        tags += [a == b for a, b in itertools.zip_longest(target, prediction)]
        entities, predicted = _find_entities(target), _find_entities(prediction)
        correct += len(entities & predicted)
        num_predicted, num_targets = num_predicted + len(predicted), num_targets + len(entities)
    precision, recall = (correct / count if count else 0.0 for count in (num_predicted, num_targets))
    f1 = 2 * precision * recall / (precision + recall) if correct else 0.0
    values = {'entity_f1': f1, 'precision': precision, 'recall': recall, 'tag_accuracy': float(np.mean(tags))}
    return {name: 100 * value for name, value in values.items()}


def _find_entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Returns the type and the indices of the first and the last word of each entity."""
    entities, start, previous_prefix, previous_type = set(), 0, 'O', ''
    for index, tag in enumerate([*tags, 'O']):
        prefix, kind = tag[0], tag[1:].split('-', 1)[-1] or '_'
        begins = prefix in 'BS' or previous_prefix in 'OES.' or kind != previous_type
        if previous_prefix not in 'O.' and (begins or prefix in 'O.'):
            entities.add((previous_type, start, index - 1))
        if begins:
            start = index
        previous_prefix, previous_type = prefix, kind
    return entities


def span_metrics(targets: Texts, predictions: Texts) -> Metrics:
    """Computes SQuAD 2.0's metrics from JSON targets {'text': [...], ...}; an empty prediction means no answer."""
    answers = [json.loads(target)['text'] for target in targets]
    words = [[text for text in texts if normalize_answer(text)] or [_NO_ANSWER] for texts in answers]
    scores = _score_answers(words, [text if normalize_answer(text) else _NO_ANSWER for text in predictions])
    has_answer = np.array([bool(texts) for texts in answers])
    groups = (('', np.full(len(answers), True)), ('HasAns_', has_answer), ('NoAns_', ~has_answer))
    return {
        f'{prefix}{name}': value
        for prefix, rows in groups
        if rows.any()
        for name, value in _average_em_and_f1(scores[rows]).items()
    }


METRICS_BY_NAME: dict[str, Metric] = {
    'accuracy': accuracy,
    'exact_match': exact_match,
    'macro_f1': macro_f1,
    'best_constant_prediction': best_constant_prediction,
    'squad': lambda targets, predictions: squad_em_and_f1([[target] for target in targets], predictions),
    'rouge': rouge,
    'bleu': bleu,
    'regression': regression_metrics,
    'entity_f1': entity_f1,
    'span_answers': span_metrics,
}


def select_metrics(names: Texts | str) -> list[Metric]:
    """Returns the metric functions named in a list or a comma-separated string."""
    names = [name.strip() for name in names.split(',')] if isinstance(names, str) else list(names)
    if not names or not set(names) <= set(METRICS_BY_NAME):
        raise UserError(
            f'METRICS must be a list of names from {", ".join(METRICS_BY_NAME)}, got {names}; '
            "set METRICS = ['accuracy']"
        )
    return [METRICS_BY_NAME[name] for name in names]


def make_group_postprocessor(column: str) -> Callable[..., Any]:
    """Returns a seqio postprocessor that converts a target to (text, value of `column`), and keeps predictions."""

    def postprocess_target(text: str, example: dict[str, Any] | None = None, is_target: bool = False) -> Any:
        return (text, example[column].decode()) if is_target and example is not None else text

    return postprocess_target


def build_grouped_metric(metric: Metric) -> Metric:
    """Wraps a metric to also return one value per group of (text, group) targets, with the key NAME/GROUP."""

    def grouped_metric(targets: Sequence[tuple[str, str]], predictions: Texts) -> Metrics:
        rows: dict[str, tuple[list[str], list[str]]] = {}
        for (target, group), prediction in zip(targets, predictions, strict=True):
            texts, predicted = rows.setdefault(group, ([], []))
            texts.append(target)
            predicted.append(prediction)
        values = metric([text for text, _ in targets], predictions)
        for group in sorted(rows):
            values |= {f'{name}/{group}': value for name, value in metric(*rows[group]).items()}
        return values

    return grouped_metric
