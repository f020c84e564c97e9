"""T5's prompts (Raffel et al. 2020, appendix D): preprocessors that build inputs and targets, and postprocessors.

Postprocessors convert texts to the values that metrics compare. seqio calls them as f(text, example=...,
is_target=...), with is_target=True for the target and False for a prediction; `example` is the preprocessed example,
with NumPy values and strings as bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.lazy_imports import tf
from remixer_tasks.benchmarks.text_task import LabelledDataset, Metric, Preprocessor, TextTask

# Class id of an unlabelled example, and of a predicted text that is not a label.
UNLABELLED = INVALID = -1
NO_LABEL = '<unk>'
# fmt: off
_DETERMINERS = frozenset([
    'a', 'an', 'few', 'her', 'his', 'each', 'every', 'many', 'much', 'my', 'our', 'some', 'that', 'the', 'their',
    'these', 'this', 'those', 'which', 'whose', 'your',
])
# fmt: on
_NUMBER = re.compile(r'\s*[-+]?([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?\s*')
Example = Mapping[str, Any]
Features = Sequence[str] | Mapping[str, str]


def build_classification_preprocessor(
    name: str, features: Features, labels: Sequence[str], markup: bool = False
) -> Preprocessor:
    """Returns a preprocessor that builds 'NAME feature: text feature: text ...', with the label's name as the target.

    `features` lists the features, or maps their names in the prompt to their names in the data. If `markup` is True,
    the HTML tags of MultiRC's passages are removed.
    """
    columns = features if isinstance(features, Mapping) else {feature: feature for feature in features}

    def format_example(example):
        parts = [name]
        for feature, column in columns.items():
            parts += [f'{feature}:', example[column]]
        inputs = tf.strings.join(parts, separator=' ')
        if markup:
            inputs = tf.strings.regex_replace(tf.strings.regex_replace(inputs, '<br>', ' '), '</?b>', '')
        target = tf.gather(tf.constant([NO_LABEL, *labels]), example['label'] - UNLABELLED)
        return {**_select_idx_features(example), 'inputs': inputs, 'targets': target}

    return lambda dataset: dataset.map(format_example)


def format_stsb(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Builds STS-B's inputs and targets; a target is the score rounded to a multiple of 0.2, as in '3.8'."""

    def format_example(example):
        parts = ['stsb sentence1:', example['sentence1'], 'sentence2:', example['sentence2']]
        score = tf.as_string(tf.round(example['label'] * 5) / 5, precision=1)
        return {**_select_idx_features(example), 'inputs': tf.strings.join(parts, separator=' '), 'targets': score}

    return dataset.map(format_example)


def format_record_queries(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Builds one ReCoRD example per correct answer to a query; for a query without answers, the target is '<unk>'."""

    def split_by_answer(example):
        passage = tf.strings.regex_replace(example['passage'], r'([.?!"\'])\n@highlight\n', r'\1 ')
        passage = tf.strings.regex_replace(passage, r'\n@highlight\n', '. ')
        entities = tf.strings.reduce_join(example['entities'], separator=', ')
        parts = ['record query:', example['query'], 'entities:', entities, 'passage:', passage]
        answers = example['answers']
        shared = {
            **_select_idx_features(example),
            'inputs': tf.strings.join(parts, separator=' '),
            'answers': answers,
        }
        targets = tf.cond(tf.size(answers) > 0, lambda: answers, lambda: tf.constant([NO_LABEL]))
        each = tf.data.Dataset.from_tensor_slices(targets)
        return each.map(lambda target: {**shared, 'targets': target})

    return dataset.flat_map(split_by_answer)


def format_squad(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Builds 'question: ... context: ...' with spaces around punctuation; the target is the first correct answer."""

    def format_example(example):
        answers = _pad_punctuation(example['answers/text'])
        parts = ['question:', _pad_punctuation(example['question']), 'context:', _pad_punctuation(example['context'])]
        inputs = tf.strings.regex_replace(tf.strings.join(parts, separator=' '), r'\s+', ' ')
        return {'inputs': inputs, 'targets': answers[0], 'answers': answers, 'id': example['id']}

    return dataset.map(format_example)


def _pad_punctuation(text: tf.Tensor) -> tf.Tensor:
    text = tf.strings.regex_replace(text, r'([[:punct:]])', r' \1 ')
    return tf.strings.regex_replace(text, r'\s+', ' ')


def _select_idx_features(example):
    return {name: value for name, value in example.items() if name.split('/')[0] == 'idx'}


@dataclasses.dataclass(frozen=True)
class ClassIdPostprocessor:
    """Postprocessor that converts a text to its index in `labels`, or to INVALID if the text is not a label."""

    labels: tuple[str, ...]

    def __call__(self, text: str, **_: Any) -> int:
        return self.labels.index(text) if text in self.labels else INVALID


def build_classification_task(
    name: str, dataset: LabelledDataset, prompt: str, features: Features, labels: Sequence[str], *metrics: Metric
) -> TextTask:
    """Returns a task that formats examples with `build_classification_preprocessor` and compares class ids."""
    to_text = build_classification_preprocessor(prompt, features, labels)
    return TextTask(name, dataset, to_text, ClassIdPostprocessor(tuple(labels)), metrics)


def parse_number(text: str, default: float = INVALID, **_: Any) -> float:
    """Parses a finite decimal number; returns `default` for other texts, such as 'nan', 'infinity' and '1_000'."""
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else float(default)


class MultiRCPostprocessor:
    """Postprocessor for MultiRC: returns the class id as 'value', and for targets also the question id as 'group'."""

    labels = ('False', 'True')

    def __call__(self, text: str, example: Example | None = None, is_target: bool = False) -> dict[str, Any]:
        answer = {'value': ClassIdPostprocessor(self.labels)(text)}
        return {**answer, 'group': int(example['idx/question'])} if is_target and example is not None else answer


def postprocess_record(text: str, example: Example | None = None, is_target: bool = False) -> dict[str, Any]:
    """Postprocessor for ReCoRD: returns {'value': text}, or for targets {'value': answers, 'group': query id}."""
    if not is_target or example is None:
        return {'value': text}
    group = (int(example['idx/passage']), int(example['idx/query']))
    return {'value': [answer.decode() for answer in example['answers']], 'group': group}


def postprocess_squad(text: str, example: Example | None = None, is_target: bool = False) -> str | list[str]:
    """Postprocessor for SQuAD: returns a prediction unchanged; for a target, returns all correct answers."""
    return [answer.decode() for answer in example['answers']] if is_target and example is not None else text


def matches_candidate(text: str, example: Example | None = None, is_target: bool = False) -> int:
    """Returns 1 if a WSC prediction names the candidate of the example, 0 if not, and INVALID if it is empty.

    For targets, returns the label. Case and determiners are ignored, and one name may contain the other: 'bunny'
    matches 'the fuzzy bunny'. A possessive matches only another possessive.
    """
    assert example is not None
    if is_target:
        return int(example['label'])
    target = example['targets_pretokenized']
    predicted, candidate = (
        ' '.join(word for word in name.strip().lower().split(' ') if word not in _DETERMINERS)
        for name in (text, target.decode() if isinstance(target, bytes) else str(target))
    )
    if not predicted:
        return INVALID
    if ("'" in predicted) != ("'" in candidate):
        return 0
    words, candidate_words = set(predicted.split(' ')), set(candidate.split(' '))
    return int(words <= candidate_words or candidate_words <= words)
