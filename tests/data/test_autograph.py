"""Pipelines are built without AutoGraph where they can be, and give the same examples."""

import inspect

import numpy as np
import seqio
import tensorflow as tf

from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.data.stream import without_autograph

TEXTS = ['a', 'bcd', 'ef', 'ghijk']


def _dataset(function):
    return tf.data.Dataset.from_tensor_slices(TEXTS).map(function)


def test_a_function_with_an_if_on_tensors_is_converted():
    calls = []

    def double_long(text):
        calls.append(text)
        if tf.strings.length(text) > 2:
            text = text + text
        return text

    built = without_autograph(lambda: _dataset(double_long))
    assert [text.decode() for text in built.as_numpy_iterator()] == ['a', 'bcdbcd', 'ef', 'ghijkghijk']
    assert len(calls) == 2


def test_a_function_without_one_is_not_converted():
    files = []

    def upper(text):
        files.append(inspect.currentframe().f_code.co_filename)
        return tf.strings.upper(text)

    built = without_autograph(lambda: _dataset(upper))
    assert [text.decode() for text in built.as_numpy_iterator()] == ['A', 'BCD', 'EF', 'GHIJK']
    # AutoGraph would run a function of a file that it has written.
    assert files == [__file__]


def _config(**settings):
    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices(TEXTS).map(lambda text: {'inputs': text, 'targets': text})

    feature = seqio.Feature(seqio.ByteVocabulary())
    task = seqio.Task(
        'autograph',
        seqio.FunctionDataSource(read, ['train']),
        output_features={'inputs': feature, 'targets': feature},
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos_after_trim],
    )
    return pipeline.DatasetConfig(task, {'inputs': 4, 'targets': 4}, 2, **settings)


def test_batches_are_those_of_a_pipeline_with_autograph(monkeypatch):
    config = _config(shuffle=False)
    without = [batch['encoder_input_tokens'].tolist() for batch in task_batches.EvalBatches(config)]
    monkeypatch.setattr(task_batches, 'without_autograph', lambda build: build())
    assert [batch['encoder_input_tokens'].tolist() for batch in task_batches.EvalBatches(config)] == without
    assert without == [[[100, 1, 0, 0], [101, 102, 103, 1]], [[104, 105, 1, 0], [106, 107, 108, 1]]]


def test_a_position_of_a_pipeline_with_autograph_is_restored(monkeypatch):
    config = _config(seed=3)
    with monkeypatch.context() as patch:
        patch.setattr(task_batches, 'without_autograph', lambda build: build())
        unbroken = task_batches.TrainBatches(config, threads=1)
    for _ in range(3):
        next(unbroken)
    resumed = task_batches.TrainBatches(config, threads=1)
    resumed.restore(unbroken.capture())
    for _ in range(5):
        expected, found = next(unbroken), next(resumed)
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
