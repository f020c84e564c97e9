"""T5's wording of examples (Raffel et al. 2020, appendix D): seqio preprocessors that make `inputs` and `targets`.

Features for metrics are passed on: `idx` or `idx/...`, `answers`, `label`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from remixer_t5x.lazy import tf
from remixer_tasks.benchmarks.dataset import UNLABELLED

Preprocessor: TypeAlias = 'Callable[[tf.data.Dataset], tf.data.Dataset]'
NO_LABEL = '<unk>'


def classification(
    name: str, features: Sequence[str] | Mapping[str, str], labels: Sequence[str], markup: bool = False
) -> Preprocessor:
    """'NAME feature: text feature: text ...', and the label's name as target.

    features: in their order; a mapping is from the name in the text to the name in the data.
    markup: removes the HTML of MultiRC's passages: <br> becomes a space.
    """

    columns = features if isinstance(features, Mapping) else {feature: feature for feature in features}

    def as_text(example):
        parts = [name]
        for feature, column in columns.items():
            parts += [f'{feature}:', example[column]]
        inputs = tf.strings.join(parts, separator=' ')
        if markup:
            inputs = tf.strings.regex_replace(tf.strings.regex_replace(inputs, '<br>', ' '), '</?b>', '')
        target = label_name(example['label'], labels)
        return {**_index(example), 'inputs': inputs, 'targets': target}

    return lambda dataset: dataset.map(as_text)


def label_name(label: tf.Tensor, labels: Sequence[str]) -> tf.Tensor:
    """The name of class `label`, NO_LABEL for UNLABELLED."""
    return tf.gather(tf.constant([NO_LABEL, *labels]), label - UNLABELLED)


def similarity(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """STS-B: the score in steps of 0.2, as in '3.8'."""

    def as_text(example):
        parts = ['stsb sentence1:', example['sentence1'], 'sentence2:', example['sentence2']]
        score = tf.as_string(tf.round(example['label'] * 5) / 5, precision=1)
        return {**_index(example), 'inputs': tf.strings.join(parts, separator=' '), 'targets': score}

    return dataset.map(as_text)


def record(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """ReCoRD: one example for every right answer of a query, or one without a target if the answers are not public.

    The highlights of the passage become sentences.
    """

    def per_answer(example):
        passage = tf.strings.regex_replace(example['passage'], r'([.?!"\'])\n@highlight\n', r'\1 ')
        passage = tf.strings.regex_replace(passage, r'\n@highlight\n', '. ')
        entities = tf.strings.reduce_join(example['entities'], separator=', ')
        parts = ['record query:', example['query'], 'entities:', entities, 'passage:', passage]
        answers = example['answers']
        shared = {**_index(example), 'inputs': tf.strings.join(parts, separator=' '), 'answers': answers}
        targets = tf.cond(tf.size(answers) > 0, lambda: answers, lambda: tf.constant([NO_LABEL]))
        each = tf.data.Dataset.from_tensor_slices(targets)
        return each.map(lambda target: {**shared, 'targets': target})

    return dataset.flat_map(per_answer)


def question_answering(unanswerable: str | None = None) -> Preprocessor:
    """SQuAD: 'question: ... context: ...' with spaces around punctuation; the first right answer is the target.

    unanswerable: the target, and the only right answer, of questions that have none; None if all have one.
    """

    def as_text(example):
        answers = _spaced(example['answers/text'])
        if unanswerable is not None:
            nothing = tf.constant([unanswerable])
            answers = tf.cond(tf.size(answers) > 0, lambda: answers, lambda: nothing)
        parts = ['question:', _spaced(example['question']), 'context:', _spaced(example['context'])]
        inputs = tf.strings.regex_replace(tf.strings.join(parts, separator=' '), r'\s+', ' ')
        return {'inputs': inputs, 'targets': answers[0], 'answers': answers, 'id': example['id']}

    return lambda dataset: dataset.map(as_text)


def _spaced(text: tf.Tensor) -> tf.Tensor:
    text = tf.strings.regex_replace(text, r'([[:punct:]])', r' \1 ')
    return tf.strings.regex_replace(text, r'\s+', ' ')


def _index(example):
    return {name: value for name, value in example.items() if name.split('/')[0] == 'idx'}
