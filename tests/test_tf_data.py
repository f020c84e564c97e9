"""All datasets are read without autotuning; see `remixer_t5x.tf_data`."""

import re

import numpy as np
import seqio
import tensorflow as tf

from remixer_t5x import tf_data
from remixer_t5x.data import pipeline, task_batches
from tests.support.paths import ROOT


def test_arrays_are_the_elements_without_autotuning():
    dataset = tf.data.Dataset.range(5).map(lambda number: number * number, num_parallel_calls=tf.data.AUTOTUNE)
    assert tf_data.disable_autotune(dataset).options().autotune.enabled is False
    np.testing.assert_array_equal(list(tf_data.iterate_as_numpy(dataset)), [0, 1, 4, 9, 16])


def test_batches_are_read_without_autotuning(monkeypatch):
    opened = []
    iterate = tf.data.Dataset.__iter__
    monkeypatch.setattr(tf.data.Dataset, '__iter__', lambda dataset: opened.append(dataset) or iterate(dataset))
    features = {name: seqio.Feature(seqio.ByteVocabulary()) for name in ('inputs', 'targets')}
    source = seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensors({'inputs': 'a', 'targets': 'b'}).repeat(9),
        splits=['train'],
    )
    task = seqio.Task('letters', source, features, preprocessors=[seqio.preprocessors.tokenize])
    config = pipeline.DatasetConfig(task, {'inputs': 4, 'targets': 4}, batch_size=4)
    next(task_batches.TrainBatches(config))
    assert len(list(task_batches.EvalBatches(config))) == 3
    assert [dataset.options().autotune.enabled for dataset in opened] == [False, False]


def test_as_numpy_iterator_is_called_only_in_tf_data():
    files = [path for name in ('remixer_t5x', 'tasks', 'scripts') for path in (ROOT / name).rglob('*.py')]
    callers = [path for path in files if re.search(r'\bas_numpy_iterator\(', path.read_text())]
    assert callers == [ROOT / 'remixer_t5x/tf_data.py']
