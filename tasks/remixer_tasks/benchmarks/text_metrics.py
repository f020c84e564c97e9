"""Metrics of free text, in percent: SQuAD's, MultiRC's and ReCoRD's, and BLEU and ROUGE as T5 computes them.

BLEU and ROUGE need the libraries sacrebleu and rouge-score, and use T5's settings.
"""

import collections
import importlib
import re
import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks import class_metrics
from remixer_tasks.benchmarks.answers import INVALID
from remixer_tasks.benchmarks.class_metrics import Metrics, check_lengths

_PUNCTUATION = str.maketrans('', '', string.punctuation)
ROUGE = ('rouge1', 'rouge2', 'rougeLsum')


def normalize(answer: str) -> str:
    """Lower case, without ASCII punctuation, the articles a, an and the, and superfluous white space."""
    return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', answer.lower().translate(_PUNCTUATION)).split())


def squad(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> Metrics:
    """`em` and `f1`: the maximum over the right answers of each question. Empty if no question has an answer."""
    check_lengths(targets, predictions)
    if not any(targets):
        return {}
    return _em_and_f1(_scores(targets, predictions))


def squad_2(unanswerable: str) -> class_metrics.Metric:
    """SQuAD 2.0's `em`, `f1`, and both over the questions with and without an answer (`HasAns_`, `NoAns_`).

    unanswerable: the text for no answer, in targets and in predictions.
    """

    def squad_with_unanswerable(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> Metrics:
        check_lengths(targets, predictions)
        nothing = normalize(unanswerable)
        has_answer = np.array([all(normalize(text) != nothing for text in answers) for answers in targets])
        scores = _scores(targets, predictions)
        groups = (('', has_answer | ~has_answer), ('HasAns_', has_answer), ('NoAns_', ~has_answer))
        return {
            f'{prefix}{name}': value
            for prefix, rows in groups
            if rows.any()
            for name, value in _em_and_f1(scores[rows]).items()
        }

    return squad_with_unanswerable


def record(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """ReCoRD: SQuAD's metrics over the first example of each query: the data repeats a query for each answer."""
    first: dict[Any, tuple[Sequence[str], str]] = {}
    for target, prediction in zip(targets, predictions, strict=True):
        first.setdefault(target['group'], (target['value'], prediction['value']))
    return squad([value for value, _ in first.values()], [text for _, text in first.values()])


def multirc_f1(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """MultiRC's F1a: F1 of 'True' over all answers of all questions."""
    return class_metrics.f1([target['value'] for target in targets], [each['value'] for each in predictions])


def multirc_exact_match(targets: Sequence[dict[str, Any]], predictions: Sequence[dict[str, Any]]) -> Metrics:
    """Share of MultiRC's questions whose answers are all judged right."""
    if all(target['value'] == INVALID for target in targets):
        return {}
    right: dict[Any, bool] = collections.defaultdict(lambda: True)
    for target, prediction in zip(targets, predictions, strict=True):
        right[target['group']] &= target['value'] == prediction['value']
    return {'exact_match': 100 * float(np.mean(list(right.values())))}


def _em_and_f1(scores: np.ndarray) -> Metrics:
    em, f1 = scores.mean(axis=0)
    return {'em': 100 * float(em), 'f1': 100 * float(f1)}


def _scores(targets: Sequence[Sequence[str]], predictions: Sequence[str]) -> np.ndarray:
    """[questions, 2]: exact match and F1, each with the answer for which it is largest."""
    scores = []
    for answers, prediction in zip(targets, predictions, strict=True):
        text, normalized = normalize(prediction), [normalize(answer) for answer in answers]
        f1 = max((_overlap(answer.split(), text.split()) for answer in normalized), default=0.0)
        scores.append((text in normalized, f1))
    return np.array(scores, float)


def _overlap(answer: list[str], prediction: list[str]) -> float:
    """F1 of two bags of words; 0 if one is empty."""
    common = sum((collections.Counter(answer) & collections.Counter(prediction)).values())
    return 2 * common / (len(answer) + len(prediction)) if common else 0.0


def bleu(targets: Sequence[str] | Sequence[Sequence[str]], predictions: Sequence[str]) -> Metrics:
    """sacrebleu's corpus BLEU with its international tokenizer. Targets: one text each, or several references each."""
    check_lengths(targets, predictions)
    if not targets:
        return {}
    # sacrebleu takes a list for each reference, and not for each example.
    references = [list(targets)] if isinstance(targets[0], str) else [list(each) for each in zip(*targets, strict=True)]
    score = _library('sacrebleu').corpus_bleu(
        list(predictions), references, smooth_method='exp', smooth_value=0.0, tokenize='intl'
    )
    return {'bleu': float(score.score)}


def rouge(targets: Sequence[str], predictions: Sequence[str]) -> Metrics:
    """The mean F-measure of `rouge1`, `rouge2` and `rougeLsum` over the examples, without stemming.

    T5 prints the middle of a bootstrap of that mean, which differs from it by chance in the second decimal.
    """
    check_lengths(targets, predictions)
    if not targets:
        return {}
    scorer = _library('rouge_score.rouge_scorer').RougeScorer(ROUGE)
    pairs = zip(targets, predictions, strict=True)
    # rougeLsum takes a sentence per line.
    scores = [scorer.score(*(text.replace(' . ', ' .\n') for text in pair)) for pair in pairs]
    return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split('.')[0]
        raise UserError(
            f"the metric needs {package}, which cannot be imported ({error}): pip install 'remixer-t5x[generation]'"
        ) from error
