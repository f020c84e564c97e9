"""Winograd schemas in T5's format: the pronoun is marked with asterisks, and the target is its referent.

WSC models are trained on SuperGLUE's true pairs and on DPR (Rahman and Ng 2012). The evaluation checks whether these
models predict the candidate noun of a pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from remixer_t5x.lazy_imports import tf
from remixer_tasks.benchmarks import prompts, raw_rows, super_glue, text_metrics
from remixer_tasks.benchmarks.text_task import (
    INTEGER,
    TEST,
    TEXTS,
    TRAIN,
    VALIDATION,
    Example,
    LabelledDataset,
    PublishedFile,
    TextTask,
    build_single_file_layouts,
    build_text_features,
)

# Replacements for the texts in which span2_index is not the index of the pronoun.
_CORRECTIONS = dict(
    zip(super_glue.TEXTS_WITH_WRONG_INDEX, (('him," he said. ', 'X ," he said.'), (' it ', ' X ')), strict=True)
)


def _format_wsc(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats SuperGLUE's WSC; the target is the candidate, and `label` is 1 if the pronoun refers to the candidate."""

    def format_example(example):
        inputs = tf.strings.join(['wsc:', _mark_pronoun(example)], separator=' ')
        return {'idx': example['idx'], 'label': example['label'], 'inputs': inputs, 'targets': example['span1_text']}

    return dataset.map(format_example)


def _format_true_pairs(dataset: tf.data.Dataset) -> tf.data.Dataset:
    return _format_wsc(dataset.filter(lambda example: example['label'] == 1))


def _mark_pronoun(example: Example) -> tf.Tensor:
    """Marks the pronoun with asterisks. Like T5, first replaces the pronoun by X, then every X."""
    text, index = example['text'], example['span2_index']
    words = tf.strings.split(text, sep=' ')
    before, after = (tf.strings.reduce_join(part, separator=' ') for part in (words[:index], words[index + 1 :]))
    # Like T5, appends a space even if the pronoun is the last word.
    blanked = tf.strings.join([before, 'X', after], separator=' ')
    for original, (typo, correction) in _CORRECTIONS.items():
        blanked = tf.where(text == original, original.replace(typo, correction), blanked)
    return tf.strings.regex_replace(blanked, ' X ', tf.strings.join([' *', example['span2_text'], '* ']))


def _format_dpr(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats the rows of DPR; the input marks the first occurrence of the pronoun in the sentence."""

    def format_example(example):
        pronoun = tf.strings.join([' (', example['pronoun'], r')( |\.|,)'])
        starred = tf.strings.regex_replace(example['sentence'], pronoun, r' *\1*\2', replace_global=False)
        inputs = tf.strings.join(['wsc:', starred], separator=' ')
        return {'inputs': inputs, 'targets': example['candidates'][example['label']]}

    return dataset.map(format_example)


def _read_dpr(path: str) -> Iterator[Example]:
    return raw_rows.parse_rows(_read_dpr_blocks, _parse_dpr_block, path)


def _read_dpr_blocks(path: str) -> Iterator[tuple[int, Example]]:
    """Yields each block of non-blank lines with the number of its first line."""
    for has_text, numbered in itertools.groupby(raw_rows.read_lines(path), lambda row: bool(row[1].strip())):
        if has_text:
            numbers, lines = zip(*numbered, strict=True)
            yield numbers[0], {'lines': [line.strip() for line in lines]}


def _parse_dpr_block(block: Example) -> Iterator[Example]:
    sentence, pronoun, names, antecedent = block['lines']
    candidates = [name.strip() for name in names.split(',')]
    label = candidates.index(antecedent)
    yield {'sentence': sentence, 'pronoun': pronoun, 'candidates': candidates, 'label': label}


_DPR_URL = 'https://s3.amazonaws.com/datasets.huggingface.co/definite_pronoun_resolution/{}.c.txt'
_DPR_SHA256 = {
    'train': 'c310158d0cbac1a556e3284e6c167f4478271d8d50b0b9d15dfe428c905a0867',
    'test': 'cf1cf025e1d59a5b363e6dcfbd5a13aae8a9830831ac16fd7f865aca7a1559d8',
}
_DPR = LabelledDataset(
    name='dpr_wsc',
    features=build_text_features('sentence', 'pronoun', candidates=TEXTS, label=INTEGER),
    splits=build_single_file_layouts({TRAIN: 'dpr_wsc/train.c.txt', TEST: 'dpr_wsc/test.c.txt'}, _read_dpr),
    tfds='definite_pronoun_resolution:1.1.0',
    terms='for research: https://www.hlt.utdallas.edu/~vince/data/emnlp12/',
    downloads=tuple(PublishedFile(_DPR_URL.format(name), sha256, 'dpr_wsc') for name, sha256 in _DPR_SHA256.items()),
)


def _build_wsc_tasks(name: str, data: LabelledDataset, splits: tuple[str, ...]) -> tuple[TextTask, TextTask]:
    """Returns a training task, which contains only true pairs, and an evaluation task."""
    accuracy = (text_metrics.accuracy,)
    return (
        TextTask(f'{name}_simple_train', data, _format_true_pairs, splits=(TRAIN,)),
        TextTask(f'{name}_simple_eval', data, _format_wsc, prompts.matches_candidate, accuracy, splits=splits),
    )


TASKS = (
    *_build_wsc_tasks('super_glue_wsc_v102', super_glue.build_dataset('WSC'), (VALIDATION, TEST)),
    TextTask('dpr_v001_simple', _DPR, _format_dpr, metrics=(text_metrics.accuracy,)),
)
FEW_SHOT = _build_wsc_tasks('fewglue_wsc_v001', super_glue.build_few_shot_dataset('WSC'), (VALIDATION,))
