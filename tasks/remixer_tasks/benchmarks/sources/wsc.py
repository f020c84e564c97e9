"""Winograd schemas as T5 does them: the pronoun between stars in the text, the noun that it refers to as target.

SuperGLUE's WSC is trained on its true pairs and on DPR (Rahman and Ng 2012), and judged by whether the predicted noun
is the candidate of the pair.
"""

from __future__ import annotations

from collections.abc import Iterator

from remixer_t5x.lazy import tf
from remixer_tasks.benchmarks import answers, class_metrics
from remixer_tasks.benchmarks.sources import super_glue_files
from remixer_tasks.benchmarks.sources.dataset import (
    INTEGER,
    TEST,
    TEXT,
    TEXTS,
    TRAIN,
    VALIDATION,
    Dataset,
    Download,
    Example,
    Layout,
)
from remixer_tasks.benchmarks.text_task import TextTask
from remixer_tasks.files import raw_rows

LABEL = 'wsc:'
# What to replace in the texts whose pronoun is not the word that the index points at.
_CORRECTIONS = dict(
    zip(super_glue_files.PRONOUN_ELSEWHERE, (('him," he said. ', 'X ," he said.'), (' it ', ' X ')), strict=True)
)


def pairs(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """SuperGLUE's WSC: the candidate is the target whether or not the pronoun refers to it; `label` says that."""

    def as_text(example):
        inputs = tf.strings.join([LABEL, _starred(example)], separator=' ')
        kept = {name: example[name] for name in ('idx', 'label')}
        return {**kept, 'inputs': inputs, 'targets': example['span1_text']}

    return dataset.map(as_text)


def true_pairs(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Only the pairs that belong together, for training."""
    return pairs(dataset.filter(lambda example: example['label'] == 1))


def _starred(example: Example) -> tf.Tensor:
    """The text with the pronoun between stars; T5 puts an X in its place first, and stars in the place of every X."""
    text, index = example['text'], example['span2_index']
    words = tf.strings.split(text, sep=' ')
    before, after = (tf.strings.reduce_join(part, separator=' ') for part in (words[:index], words[index + 1 :]))
    # After a pronoun at the end, T5 leaves a blank too.
    blanked = tf.strings.join([before, 'X', after], separator=' ')
    for original, (wrong, right) in _CORRECTIONS.items():
        blanked = tf.where(text == original, original.replace(wrong, right), blanked)
    return tf.strings.regex_replace(blanked, ' X ', tf.strings.join([' *', example['span2_text'], '* ']))


def resolution(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """DPR: the pronoun to resolve is its first occurrence in the sentence."""

    def as_text(example):
        pronoun = tf.strings.join([' (', example['pronoun'], r')( |\.|,)'])
        starred = tf.strings.regex_replace(example['sentence'], pronoun, r' *\1*\2', replace_global=False)
        return {
            'inputs': tf.strings.join([LABEL, starred], separator=' '),
            'targets': example['candidates'][example['label']],
        }

    return dataset.map(as_text)


def _read_dpr(path: str) -> Iterator[Example]:
    """Five lines an example: sentence, pronoun, candidates, the right one, nothing."""
    block: list[str] = []
    for number, line in raw_rows.lines(path):
        if line.strip():
            block.append(line.strip())
        elif block:
            yield _dpr_example(block, path, number - len(block))
            block = []
    if block:
        yield _dpr_example(block, path, number - len(block) + 1)


def _dpr_example(block: list[str], path: str, number: int) -> Example:
    if len(block) != 4:
        raise raw_rows.bad(path, number, f'{len(block)} lines instead of sentence, pronoun, candidates, antecedent')
    candidates = [candidate.strip() for candidate in block[2].split(',')]
    if len(candidates) != 2 or block[3] not in candidates:
        raise raw_rows.bad(path, number + 2, f'the antecedent {block[3]!r} is not one of two candidates {block[2]!r}')
    return {
        'sentence': block[0],
        'pronoun': block[1],
        'candidates': candidates,
        'label': candidates.index(block[3]),
    }


_DPR_URL = 'https://s3.amazonaws.com/datasets.huggingface.co/definite_pronoun_resolution/{}.c.txt'
DPR_DATA = Dataset(
    name='dpr_wsc',
    features={'sentence': TEXT, 'pronoun': TEXT, 'candidates': TEXTS, 'label': INTEGER},
    splits={
        TRAIN: [Layout(('dpr_wsc/train.c.txt',), _read_dpr)],
        TEST: [Layout(('dpr_wsc/test.c.txt',), _read_dpr)],
    },
    tfds='definite_pronoun_resolution:1.1.0',
    terms='for research: https://www.hlt.utdallas.edu/~vince/data/emnlp12/',
    downloads=(
        Download(
            _DPR_URL.format('train'), 'c310158d0cbac1a556e3284e6c167f4478271d8d50b0b9d15dfe428c905a0867', 'dpr_wsc'
        ),
        Download(
            _DPR_URL.format('test'), 'cf1cf025e1d59a5b363e6dcfbd5a13aae8a9830831ac16fd7f865aca7a1559d8', 'dpr_wsc'
        ),
    ),
)

_WSC = super_glue_files.dataset('WSC')
TRAINING = TextTask('super_glue_wsc_v102_simple_train', _WSC, true_pairs, splits=(TRAIN,))
EVALUATION = TextTask(
    'super_glue_wsc_v102_simple_eval',
    _WSC,
    pairs,
    answers.refers,
    (class_metrics.accuracy,),
    splits=(VALIDATION, TEST),
)
DPR = TextTask('dpr_v001_simple', DPR_DATA, resolution, metrics=(class_metrics.accuracy,))
FEW_SHOT_TRAINING = TextTask(
    'fewglue_wsc_v001_simple_train', super_glue_files.few_shot('WSC'), true_pairs, splits=(TRAIN,)
)
FEW_SHOT_EVALUATION = TextTask(
    'fewglue_wsc_v001_simple_eval',
    super_glue_files.few_shot('WSC'),
    pairs,
    answers.refers,
    (class_metrics.accuracy,),
    splits=(VALIDATION,),
)
