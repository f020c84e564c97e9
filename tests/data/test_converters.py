"""Batches have the arrays that `batch_formats` lists, with seqio's values, labels and masked tokens."""

import dataclasses
import json

import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.data import batch_formats, pipeline, task_batches, token_alignment
from remixer_t5x.errors import UserError

FEATURES = [each.features for each in batch_formats.FORMATS[batch_formats.DECODER_ONLY]]
LENGTHS = {'inputs': 7, 'targets': 8}
# seqio's example of a prefix language model; test_pipeline.py compares encoder-decoder batches with seqio's.
ROWS = [{'inputs': [7, 8, 5, 1], 'targets': [3, 9, 1]}, {'inputs': [8, 4, 9, 3, 1], 'targets': [4, 1]}]
VOCABULARY = seqio.ByteVocabulary(extra_ids=0)


def byte_ids(text):
    return [int(token) for token in VOCABULARY.encode(text)]


def task_of(rows, **options):
    """Returns a task over rows of `inputs` and `targets`, as ids or texts; `*_pretokenized` stay texts."""
    texts = [key for key in rows[0] if key.endswith('_pretokenized')]
    rows = [
        {k: [*byte_ids(v), 1] if isinstance(v, str) and k not in texts else v for k, v in row.items()} for row in rows
    ]

    def read(split, shuffle_files, seed=None):
        specs = {
            key: tf.TensorSpec([], tf.string) if key in texts else tf.TensorSpec([None], tf.int32) for key in rows[0]
        }
        return tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=specs)

    features = {key: seqio.Feature(VOCABULARY) for key in rows[0] if key not in texts}
    source = seqio.FunctionDataSource(read, ['train'])
    return seqio.Task('a_task', source=source, preprocessors=[], output_features=features, **options)


def config_of(task, lengths, batch_size, **settings):
    return pipeline.DatasetConfig(task, lengths, batch_size, shuffle=False, **settings)


def first_batch(config):
    batch = next(iter(task_batches.EvalBatches(config)))
    shapes = {name: (array.shape, str(array.dtype)) for name, array in batch.items()}
    assert shapes == {
        name: (array.shape, str(array.dtype)) for name, array in pipeline.get_abstract_batch(config).items()
    }
    return batch


@pytest.mark.parametrize('pack', [False, True])
@pytest.mark.parametrize('features', FEATURES)
def test_a_decoder_batch_has_the_arrays_of_its_format(features, pack):
    rows = [{name: row[name] for name in features} for row in ROWS]
    lengths = {name: LENGTHS[name] for name in features}
    batch = first_batch(config_of(task_of(rows), lengths, 2, pack=pack, model_type='decoder_only'))
    if pack and len(features) == 2:
        assert batch['decoder_target_tokens'][0].tolist() == [7, 8, 5, 1, 3, 9, 1, 8, 4, 9, 3, 1, 4, 1, 0]
        assert batch['decoder_causal_attention'][0].tolist() == [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
        assert batch['decoder_loss_weights'][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]


CORRUPTED = [{'inputs': [5, 9, 7, 8], 'targets': [0, 6, 0, 0]}, {'inputs': [3, 4, 9], 'targets': [3, 0, 0]}]


@pytest.mark.parametrize('pack', [False, True])
def test_masked_tokens_are_aligned_with_their_targets(pack):
    lengths = {'inputs': 8, 'targets': 8}
    batch = first_batch(config_of(task_of(CORRUPTED), lengths, 1, pack=pack, model_type='encoder_only'))
    if pack:
        expected = {
            'encoder_input_tokens': [5, 9, 7, 8, 3, 4, 9, 0],
            'encoder_target_tokens': [0, 6, 0, 0, 3, 0, 0, 0],
            'encoder_loss_weights': [0, 1, 0, 0, 1, 0, 0, 0],
            'encoder_segment_ids': [1, 1, 1, 1, 2, 2, 2, 0],
            'encoder_positions': [0, 1, 2, 3, 0, 1, 2, 0],
        }
    else:
        expected = {
            'encoder_input_tokens': [5, 9, 7, 8, 0, 0, 0, 0],
            'encoder_target_tokens': [0, 6, 0, 0, 0, 0, 0, 0],
            'encoder_loss_weights': [0, 1, 0, 0, 0, 0, 0, 0],
        }
    assert {name: array[0].tolist() for name, array in batch.items()} == expected


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A postprocessor with a `labels` attribute, as in benchmarks."""

    labels: tuple[str, ...]

    def __call__(self, text, **_):
        return self.labels.index(text)


LABELS = ('no', 'not', 'yes')
SIMILAR_LABELS = ('strongly agree', 'strongly disagree')


def labels_config(targets, labels, texts=(), **settings):
    rows = [{'inputs': f'text {index}', 'targets': text} for index, text in enumerate(targets)]
    rows = [{**row, 'targets_pretokenized': text} for row, text in zip(rows, texts, strict=True)] if texts else rows
    task = task_of(rows, postprocess_fn=Labelled(LABELS))
    return config_of(task, {'inputs': 12, 'targets': 8}, 4, model_type='classifier', labels=labels, **settings)


def test_targets_become_the_indices_of_labels():
    batch = first_batch(labels_config(('yes', 'no', 'not'), LABELS))
    assert batch['labels'].tolist() == [2.0, 0.0, 1.0, 0.0]
    assert batch['label_weights'].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert batch['encoder_input_tokens'][0].tolist() == [*byte_ids('text 0'), 1, 0, 0, 0, 0, 0]
    assert batch['encoder_input_tokens'][3].tolist() == [0] * 12


def test_long_labels_are_compared_by_their_original_texts():
    batch = first_batch(labels_config(SIMILAR_LABELS * 2, SIMILAR_LABELS, texts=SIMILAR_LABELS * 2))
    assert batch['labels'].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_targets_become_numbers_without_labels():
    np.testing.assert_allclose(
        first_batch(labels_config(('3.8', '-1', '0.25'), None))['labels'], [3.8, -1.0, 0.25, 0.0]
    )


@pytest.mark.parametrize(
    ('call', 'words'),
    [(lambda: pipeline.DatasetConfig('any', {'inputs': 8}, 2, model_type='decoder_only'),
      "for targets, as in {'targets': 512}, or inputs and targets"),
     (lambda: first_batch(labels_config(('yes', 'maybe'), ('no', 'yes'))), 'targets of a_task, got no, yes; add maybe'),
     *((lambda text=text: first_batch(labels_config(('3.8', text), None)),
        f'targets of a_task must be finite float32 numbers .* got {text}; set LABELS')
       for text in ('many', '-1e39')),
     (lambda: pipeline.prepare_data(labels_config(('yes',), None), 384), r'3 labels of a_task.*\("no", "not", "yes"\)'),
     (lambda: labels_config(('yes',), LABELS, pack=True), 'PACK'),
     (lambda: first_batch(config_of(task_of(ROWS), LENGTHS, 1, model_type='embedding')),
      "a_task must have inputs_pretokenized and targets_pretokenized for MODEL_TYPE = 'embedding'"),
     (lambda: first_batch(config_of(task_of(CORRUPTED), {'inputs': 8, 'targets': 4}, 1, model_type='encoder_only')),
      'same length for inputs and targets')],
)  # fmt: skip
def test_data_that_does_not_fit_the_model_type_raises_an_error(call, words):
    with pytest.raises(UserError, match=words):
        call()


def test_a_mixture_has_the_rows_of_its_task():
    texts = {'inputs': 'a bc', 'targets': 'X Y'}
    task = task_of([{**texts, **{f'{name}_pretokenized': text for name, text in texts.items()}}])
    mixture = seqio.Mixture('a_mixture', [(task, 1.0)])
    expected, batch = (
        first_batch(config_of(source, {'inputs': 8, 'targets': 8}, 1, model_type='token_labels', labels=('X', 'Y')))
        for source in (task, mixture)
    )
    assert {name: array.tolist() for name, array in batch.items()} == {
        name: array.tolist() for name, array in expected.items()
    }


def test_windows_of_long_contexts_are_rows_with_an_exact_position():
    texts = [f'question: {name}? context: {"a b " * 7}{name} z' for name in 'cdefg']
    answers = [json.dumps({'text': [f'{name} z'], 'answer_start': [28]}) for name in 'cdefg']

    def read(split, shuffle_files, seed=None):
        columns = {'inputs_pretokenized': texts, 'targets_pretokenized': answers}
        return tf.data.Dataset.from_tensor_slices({**columns, 'inputs': [[1]] * 5, 'targets': [[1]] * 5})

    features = {key: seqio.Feature(VOCABULARY) for key in ('inputs', 'targets')}
    task = seqio.Task('spans', seqio.FunctionDataSource(read, ['train']), features, preprocessors=[])
    config = config_of(task, {'inputs': 30, 'targets': 30}, 2, model_type='span', doc_stride=4)
    rows = [
        token_alignment.make_span_arrays(text, answer, VOCABULARY, 30, 4)
        for text, answer in zip(texts, answers, strict=True)
    ]
    expected = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    batches = list(task_batches.EvalBatches(config))
    for name, array in expected.items():
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches])[: len(array)], array)
    # The position is inside a context.
    first, second = task_batches.TrainBatches(config), task_batches.TrainBatches(config)
    next(first)
    second.restore_states(first.capture_states())
    for _ in range(len(batches)):
        a, b = next(first), next(second)
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
