"""Batches of an encoder alone: what masked language modelling and classification read from a seqio task."""

import dataclasses

import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.errors import UserError

VOCABULARY = seqio.ByteVocabulary(extra_ids=0)


def byte_ids(text):
    return [int(token) for token in VOCABULARY.encode(text)]


def source_of(rows, **options):
    """A task over rows of `inputs` and `targets`, each ids or a text."""
    texts = [key for key in rows[0] if key.endswith('_pretokenized')]
    rows = [
        {k: [*byte_ids(v), 1] if isinstance(v, str) and k not in texts else v for k, v in row.items()} for row in rows
    ]

    def read(split, shuffle_files, seed=None):
        kinds = {
            key: tf.TensorSpec([], tf.string) if key in texts else tf.TensorSpec([None], tf.int32) for key in rows[0]
        }
        return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=kinds)

    features = {key: seqio.Feature(VOCABULARY) for key in rows[0] if key not in texts}
    source = seqio.FunctionDataSource(read, ['train'])
    return seqio.Task('a_task', source=source, preprocessors=[], output_features=features, **options)


def first(config):
    return next(iter(task_batches.EvalBatches(config)))


DAMAGED = [
    {'inputs': [5, 9, 7, 8], 'targets': [0, 6, 0, 0]},
    {'inputs': [3, 4, 9], 'targets': [3, 0, 0]},
]


@pytest.mark.parametrize('pack', [False, True])
def test_masked_tokens_stay_in_their_places(pack):
    config = pipeline.DatasetConfig(
        source_of(DAMAGED), {'inputs': 8, 'targets': 8}, 1, shuffle=False, pack=pack, frame='encoder_only'
    )
    batch = first(config)
    assert {name: array.shape for name, array in batch.items()} == pipeline.batch_shapes(config)
    if pack:
        wanted = {
            'encoder_input_tokens': [5, 9, 7, 8, 3, 4, 9, 0],
            'encoder_target_tokens': [0, 6, 0, 0, 3, 0, 0, 0],
            'encoder_loss_weights': [0, 1, 0, 0, 1, 0, 0, 0],
            'encoder_segment_ids': [1, 1, 1, 1, 2, 2, 2, 0],
            'encoder_positions': [0, 1, 2, 3, 0, 1, 2, 0],
        }
    else:
        wanted = {
            'encoder_input_tokens': [5, 9, 7, 8, 0, 0, 0, 0],
            'encoder_target_tokens': [0, 6, 0, 0, 0, 0, 0, 0],
            'encoder_loss_weights': [0, 1, 0, 0, 0, 0, 0, 0],
        }
    assert {name: array[0].tolist() for name, array in batch.items()} == wanted


def test_inputs_and_targets_of_two_lengths_are_refused():
    config = pipeline.DatasetConfig(source_of(DAMAGED), {'inputs': 8, 'targets': 4}, 1, frame='encoder_only')
    with pytest.raises(UserError, match='give inputs and targets one length'):
        task_batches.EvalBatches(config)


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A postprocessor with labels, as benchmarks have."""

    labels: tuple[str, ...]

    def __call__(self, text, **_):
        return self.labels.index(text)


def answers(*texts):
    return [{'inputs': f'text {index}', 'targets': text} for index, text in enumerate(texts)]


def labelled(rows, labels, **options):
    task = source_of(rows, postprocess_fn=Labelled(('no', 'not', 'yes')))
    return pipeline.DatasetConfig(
        task, {'inputs': 12, 'targets': 8}, 4, shuffle=False, frame='classifier', labels=labels, **options
    )


def test_answers_become_the_indices_of_labels():
    batch = first(labelled(answers('yes', 'no', 'not'), ('no', 'not', 'yes')))
    assert batch['labels'].tolist() == [2.0, 0.0, 1.0, 0.0] and batch['labels'].dtype == np.float32
    assert batch['label_weights'].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert batch['encoder_input_tokens'][0].tolist() == [*byte_ids('text 0'), 1, 0, 0, 0, 0, 0]
    assert batch['encoder_input_tokens'][3].tolist() == [0] * 12


ALIKE = ('strongly agree', 'strongly disagree')


def test_labels_are_told_apart_by_their_texts():
    """Both are cut to the same ids."""
    texts = [ALIKE[index % 2] for index in range(4)]
    rows = [{**row, 'targets_pretokenized': text} for row, text in zip(answers(*texts), texts, strict=True)]
    task = source_of(rows)
    config = pipeline.DatasetConfig(
        task, {'inputs': 12, 'targets': 8}, 4, shuffle=False, frame='classifier', labels=ALIKE
    )
    assert first(config)['labels'].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_labels_with_the_same_ids_are_refused_if_the_texts_are_gone():
    with pytest.raises(UserError, match="'strongly agree' and 'strongly disagree'"):
        first(labelled(answers(*ALIKE), ALIKE))


def test_answers_become_numbers_without_labels():
    batch = first(labelled(answers('3.8', '-1', '0.25'), None))
    np.testing.assert_allclose(batch['labels'], [3.8, -1.0, 0.25, 0.0])


@pytest.mark.parametrize(
    ('rows', 'labels', 'words'),
    [(('yes', 'maybe'), ('no', 'yes'), 'an answer of a_task is not in LABELS, which are no, yes'),
     (('3.8', 'many'), None, 'an answer of a_task is not a number')],
    ids=['label', 'number'],
)  # fmt: skip
def test_another_answer_is_refused_in_one_line(rows, labels, words):
    with pytest.raises(UserError, match=words) as raised:
        first(labelled(answers(*rows), labels))
    assert '\n' not in str(raised.value)


@pytest.mark.parametrize('labels', [None, ('no', 'yes')])
def test_labels_that_a_task_has_must_be_given(labels):
    config = labelled(answers('yes'), labels)
    with pytest.raises(UserError, match=r'a_task has 3 labels.*--gin.LABELS=\'\("no", "not", "yes"\)\''):
        pipeline.prepare(config, 384)


def test_a_classifier_takes_no_packed_rows():
    with pytest.raises(UserError, match='PACK'):
        labelled(answers('yes'), ('no', 'not', 'yes'), pack=True)
