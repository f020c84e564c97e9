"""A task's metric objects get what seqio's Evaluator gives them."""

import flax
import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.evaluate import task_examples, task_metrics

BYTES = seqio.ByteVocabulary(extra_ids=100)
TYPES = seqio.metrics.ModelOutputType


@flax.struct.dataclass
class Equal(seqio.metrics.Metric):
    """The share of predictions equal to their targets, read from ids."""

    model_output_type: TYPES = TYPES.PREDICTION
    right: float = 0.0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, target_field_name='targets', mask=None, indices_2d=None):
        decode = features[target_field_name].vocabulary.decode
        found = [decode([int(token) for token in tokens if token]) for tokens in model_output]
        wanted = [example['targets_pretokenized'].decode() for example in inputs]
        return cls(right=float(np.mean([a == b for a, b in zip(found, wanted, strict=True)])))

    def compute(self):
        return {'equal': 100 * self.right}


@flax.struct.dataclass
class MeanScore(seqio.metrics.Metric):
    model_output_type: TYPES = TYPES.SCORE
    mean: float = 0.0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, target_field_name='targets', mask=None, indices_2d=None):
        return cls(mean=float(np.mean(model_output)))

    def compute(self):
        return {'mean_score': self.mean}


def accuracy(targets, predictions):
    return {'accuracy': 100 * float(np.mean([a == b for a, b in zip(targets, predictions, strict=True)]))}


def task(name, objects, functions=()):
    feature = seqio.Feature(BYTES, add_eos=True)
    rows = {'inputs': tf.constant(['a', 'b', 'c']), 'targets': tf.constant(['yes', 'no', 'no'])}
    return seqio.Task(
        name,
        source=seqio.FunctionDataSource(
            lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(rows), ['validation']
        ),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={'inputs': feature, 'targets': feature},
        metric_objs=objects,
        metric_fns=list(functions),
    )


@pytest.mark.parametrize('functions', [(), (accuracy,)])
def test_objects_are_computed_next_to_functions(functions):
    made = task('objects', [Equal(), MeanScore()], functions)
    (found,), notes = task_examples.tasks_of([made], 'validation')
    assert found is made and not notes
    assert task_metrics.needs_target_scores(made)
    examples = task_examples.read(made, 'validation', {'inputs': 8, 'targets': 8})
    outputs = task_metrics.Outputs(['yes', 'maybe', 'no'], [0.0] * 3, [-1.0, -2.0, -3.0])
    expected = {'equal': 200 / 3, 'mean_score': -2.0} | ({'accuracy': 200 / 3} if functions else {})
    assert task_metrics.compute(examples, outputs) == pytest.approx(expected)


def test_functions_alone_need_no_objects():
    made = task('functions', [], [accuracy])
    assert not task_metrics.needs_target_scores(made)
    examples = task_examples.read(made, 'validation', {'inputs': 8, 'targets': 8})
    outputs = task_metrics.Outputs(['yes', 'no', 'no'], [0.0] * 3)
    assert task_metrics.compute(examples, outputs) == {'accuracy': 100.0}
