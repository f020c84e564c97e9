"""What `frames` says a batch holds is what seqio's converters make, and every model is one of its frames."""

import functools

import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.data import converters, frames, pipeline, task_batches
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface

FORMS = [(frame, form) for frame, forms in frames.FORMS.items() for form in forms]
# Encoders alone have converters of our own, which test_encoder_batches.py tests.
OF_DECODERS = [(frame, form) for frame, form in FORMS if 'decoder' in frame]
LENGTHS = {'inputs': 7, 'targets': 8}
# seqio's own example of a prefix language model.
ROWS = {'inputs': ([7, 8, 5, 1], [8, 4, 9, 3, 1]), 'targets': ([3, 9, 1], [4, 1])}


@functools.cache
def task(*features: str) -> seqio.Task:
    def dataset(split, shuffle_files, seed=None):
        ragged = {name: tf.ragged.constant(ROWS[name], tf.int32) for name in features}
        return tf.data.Dataset.from_tensor_slices(ragged).map(
            lambda row: {name: tf.cast(ids, tf.int32) for name, ids in row.items()}
        )

    vocabulary = seqio.PassThroughVocabulary(16)
    return seqio.Task(
        f'rows_of_{"_".join(features)}',
        seqio.FunctionDataSource(dataset, splits=('validation',)),
        {name: seqio.Feature(vocabulary, add_eos=False) for name in features},
        preprocessors=[],
    )


def rows(frame: str, *features: str, pack: bool) -> dict[str, np.ndarray]:
    lengths = {name: LENGTHS[name] for name in features}
    config = pipeline.DatasetConfig(task(*features), lengths, 2, 'validation', shuffle=False, pack=pack, frame=frame)
    (batch,) = task_batches.EvalBatches(config)
    found = {name: (array.shape, str(array.dtype)) for name, array in batch.items()}
    assert found == {name: (array.shape, str(array.dtype)) for name, array in pipeline.abstract_batch(config).items()}
    return batch


@pytest.mark.parametrize('pack', [False, True])
@pytest.mark.parametrize(
    ('frame', 'form'), OF_DECODERS, ids=[f'{frame}-{"-".join(form.features)}' for frame, form in OF_DECODERS]
)
def test_a_batch_holds_what_the_table_says(frame, form, pack):
    rows(frame, *form.features, pack=pack)


def test_a_prefix_is_marked_as_in_seqio():
    batch = rows('decoder_only', 'inputs', 'targets', pack=True)
    assert batch['decoder_target_tokens'][0].tolist() == [7, 8, 5, 1, 3, 9, 1, 8, 4, 9, 3, 1, 4, 1, 0]
    assert batch['decoder_causal_attention'][0].tolist() == [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert batch['decoder_loss_weights'][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]


def test_every_form_has_a_converter():
    assert set(converters.CONVERTERS) == {(frame, frozenset(form.features)) for frame, form in FORMS}
    assert {frame for _, able in interface.ABILITIES.values() for frame in able} <= set(frames.FORMS)


@pytest.mark.parametrize(
    ('frame', 'lengths', 'words'),
    [('decoder', LENGTHS, 'decoder_only'),
     ('encoder_decoder', {'targets': 8}, 'inputs and targets, as in'),
     ('decoder_only', {'inputs': 8}, "for targets, as in {'targets': 512}, or inputs and targets"),
     ('decoder_only', {'targets': 0}, 'positive')],
)  # fmt: skip
def test_other_features_are_refused_in_one_line(frame, lengths, words):
    with pytest.raises(UserError, match=words) as error:
        pipeline.DatasetConfig('any', lengths, 2, frame=frame)
    assert '\n' not in str(error.value)


def test_a_task_without_the_feature_is_refused():
    config = pipeline.DatasetConfig(task('targets'), LENGTHS, 2, 'validation')
    with pytest.raises(UserError, match='has no inputs'):
        pipeline.provider(config)
