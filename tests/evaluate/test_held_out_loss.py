"""Averages of an evaluation equal values computed by hand, for any batch size."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import scipy.stats
import seqio
from flax import linen as nn

from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import held_out_loss
from remixer_t5x.optim import train_step

LENGTHS = {'inputs': 16, 'targets': 12}


@pytest.fixture(scope='module')
def setting(tiny):
    model = tiny.TinyModel()
    config = pipeline.DatasetConfig(tiny.task('tiny_held_out', validation=13), LENGTHS, 4, 'validation', shuffle=False)
    params = nn.unbox(model.init(jax.random.key(0), pipeline.get_batch_shapes(config)))
    return model, config, params, jax.jit(lambda p, batch: model.loss(p, batch)[1])


def evaluate(setting, batch_size, steps=None):
    _, config, params, step = setting
    held_out = held_out_loss.Evaluation(dataclasses.replace(config, batch_size=batch_size), steps)
    return held_out_loss.evaluate_loss(params, held_out.open_batches(), step, lambda batch: batch)


@pytest.mark.parametrize('batch_size', [4, 20])
def test_averages_equal_those_of_one_large_batch(setting, batch_size):
    model, config, params, _ = setting
    (batch,) = task_batches.EvalBatches(dataclasses.replace(config, batch_size=13))
    loss, sums = jax.jit(model.loss)(params, batch)
    averages = evaluate(setting, batch_size)
    np.testing.assert_allclose(averages['loss'], float(loss / sums['weights']), rtol=1e-5)
    assert averages['perplexity'] == pytest.approx(math.exp(averages['cross_ent_loss']))
    assert averages['accuracy'] == float(sums['correct']) / float(sums['weights'])
    assert averages['tokens'] == int(batch['decoder_loss_weights'].sum())


def test_constant_loss_is_the_entropy_of_the_targets(setting):
    """The reference is SciPy's entropy of all targets; any other distribution has a higher loss."""
    model, config, params, _ = setting
    step = jax.jit(train_step.make_eval_step(model, count_targets=True))
    averages = held_out_loss.evaluate_loss(params, task_batches.EvalBatches(config), step, lambda batch: batch)
    batches = list(task_batches.EvalBatches(config))
    targets = np.concatenate([b['decoder_target_tokens'][b['decoder_loss_weights'] > 0] for b in batches])
    counts = np.bincount(targets, minlength=model.vocab_size)
    assert averages['constant_loss'] == pytest.approx(scipy.stats.entropy(counts), rel=1e-6)
    other = (counts + 1) / (counts + 1).sum()
    assert averages['constant_loss'] < -np.mean(np.log(other[targets]))
    assert 'constant_loss' not in evaluate(setting, 4)
    sums = {'loss': 1.0, 'weights': 1.0, train_step.TARGET_COUNTS: np.array([0.0, 5.0])}
    averages = held_out_loss.evaluate_loss({}, [sums], lambda _, batch: batch, lambda batch: batch)
    assert f'{averages["constant_loss"]:.4f}' == '0.0000'


def test_steps_limit_the_batches(setting):
    assert evaluate(setting, 4, steps=2)['tokens'] < evaluate(setting, 4)['tokens']
    with pytest.raises(UserError, match='EVAL_STEPS must be'):
        held_out_loss.Evaluation(setting[1], -1)


def test_a_split_without_targets_is_reported(setting, tiny):
    config = dataclasses.replace(setting[1], mixture_or_task_name=tiny.task('tiny_no_text', validation=0))
    with pytest.raises(UserError, match='must contain target tokens'):
        held_out_loss.evaluate_loss(setting[2], task_batches.EvalBatches(config), setting[3], lambda batch: batch)


def test_a_mixture_has_a_loss_for_each_of_its_tasks(setting, tiny):
    tasks = [tiny.task('tiny_one', validation=5), tiny.task('tiny_two', validation=8)]
    mixture = seqio.Mixture('tiny_mixture', [(task, 1.0) for task in tasks])
    config = dataclasses.replace(setting[1], mixture_or_task_name=mixture)
    parts = held_out_loss.Evaluation(config).split_by_task()
    assert [part.name for part in parts] == ['eval/tiny_one', 'eval/tiny_two']
    for part, task in zip(parts, tasks, strict=True):
        assert part == held_out_loss.Evaluation(
            dataclasses.replace(config, mixture_or_task_name=task), name=f'eval/{task.name}'
        )
        assert part.split_by_task() == ()
