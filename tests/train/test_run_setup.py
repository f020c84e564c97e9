"""The data of a run: training and evaluation must agree."""

import types

import pytest
import seqio

from remixer_t5x import build_model
from remixer_t5x.data import pipeline
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.held_out_loss import Evaluation
from remixer_t5x.evaluate.predictions import Decoding
from remixer_t5x.evaluate.task_evaluation import TaskEvaluation
from remixer_t5x.train import run_setup
from tests.support import toy_tasks

LENGTHS = {'inputs': 16, 'targets': 8}


def read_data(trained, evaluated=None, best_metrics=None, evaluation=None, model='t5_1_1', length_buckets=()):
    """Returns the data of a run whose training and evaluation tasks have these vocabularies."""
    tasks = evaluated and TaskEvaluation(toy_tasks.labelled(evaluated, 'evaluated'), Decoding(4, LENGTHS))
    model = build_model(f'models/{model}.gin', 'sizes/tiny.gin', VOCAB_SIZE=384)
    run = types.SimpleNamespace(
        step_config=types.SimpleNamespace(model=model, partitioner=Partitioner()),
        dataset=pipeline.DatasetConfig(toy_tasks.labelled(trained), LENGTHS, 4, length_buckets=length_buckets),
        evaluation=evaluation,
        tasks=tasks,
        folder=types.SimpleNamespace(best_metrics=best_metrics),
    )
    return run_setup.RunData(run)


def test_evaluated_tasks_must_have_the_vocabulary_of_the_training_task():
    assert read_data(seqio.ByteVocabulary(), seqio.ByteVocabulary()).record['examples_hashes']
    with pytest.raises(UserError, match='EVAL_MIXTURE_OR_TASK_NAME .* of 259 ids, got .* of 264 ids for evaluated'):
        read_data(seqio.ByteVocabulary(0), seqio.ByteVocabulary(5))


def test_best_metrics_must_belong_to_evaluated_tasks():
    vocabulary = seqio.ByteVocabulary()
    assert read_data(vocabulary, vocabulary, {'evaluated': 'accuracy'}).evaluator
    with pytest.raises(UserError, match=r"BEST_METRICS .* \(evaluated\) .* got 'evalated'; did you mean evaluated"):
        read_data(vocabulary, vocabulary, {'evalated': 'accuracy'})
    with pytest.raises(UserError, match=r"BEST_METRICS of evaluated must be one of its metrics \(accuracy.*'-acuracy'"):
        read_data(vocabulary, vocabulary, {'evaluated': '-acuracy'})
    with pytest.raises(UserError, match="BEST_METRICS must be 'mean', or map tasks to metrics, .* got 'accuracy'"):
        read_data(vocabulary, vocabulary, 'accuracy')


def test_a_metric_that_cannot_be_computed_is_reported_before_training(monkeypatch):
    def check_numbers(targets, predictions):
        raise UserError('targets must be numbers')

    monkeypatch.setattr(toy_tasks, 'accuracy', check_numbers)
    with pytest.raises(UserError, match='targets must be numbers'):
        read_data(seqio.ByteVocabulary(), seqio.ByteVocabulary())


def test_the_examples_of_the_held_out_loss_are_identified():
    vocabulary = seqio.ByteVocabulary()

    def identify(steps, batch_size=4, split='validation'):
        held_out = pipeline.DatasetConfig(toy_tasks.labelled(vocabulary), LENGTHS, batch_size, split)
        return read_data(vocabulary, evaluation=Evaluation(held_out, steps)).evaluated

    assert identify(2) == identify(1, batch_size=8)
    assert len({identify(2), identify(3), identify(None), identify(2, split='train')}) == 4


def test_length_buckets_are_rejected_if_outputs_depend_on_the_padded_length():
    assert read_data(seqio.ByteVocabulary(), length_buckets=(8,)).record['length_buckets'] == [8]
    with pytest.raises(UserError, match=r'LENGTH_BUCKETS must be \(\) .* such as FNet, got \(8,\); pass'):
        read_data(seqio.ByteVocabulary(), model='fnet', length_buckets=(8,))
