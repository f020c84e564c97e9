"""The train step of a bigram model against its gradient in NumPy."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.optim import parameter_averages, schedules, train_state, train_step, trainable
from remixer_t5x.optim.train_state import TrainState
from remixer_t5x.run_folder import metrics as run_metrics

ROWS, LENGTH, VOCAB = 8, 5, 11
GRADIENT_DESCENT = optax.sgd(1.0)


class Bigrams:
    """Predicts each target token from one input token; implements `Model.loss`."""

    model_type = 'bigrams'

    def __init__(self, dropout=False):
        self.dropout = dropout

    def init(self, rng, batch_shapes):
        return {'table': 0.1 * jax.random.normal(rng, (VOCAB, VOCAB))}

    def without_label_smoothing(self):
        return self

    def loss(self, params, batch, dropout_rng=None):
        logits = params['table'][batch['inputs']]
        if self.dropout and dropout_rng is not None:
            logits *= jax.random.bernoulli(dropout_rng, 0.5, logits.shape)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch['targets'])
        loss = jnp.sum(losses * batch['weights'])
        return loss, {'loss': loss, 'weights': jnp.sum(batch['weights'])}


def make_batch(seed=0, padded_rows=()):
    rng = np.random.default_rng(seed)
    batch = {
        'inputs': rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32),
        'targets': rng.integers(0, VOCAB, (ROWS, LENGTH), np.int32),
        # Unequal weights, for which a mean of means would be wrong.
        'weights': (rng.random((ROWS, LENGTH)) < np.linspace(0.1, 1.0, ROWS)[:, None]).astype(np.float32),
    }
    for row in padded_rows:
        batch['weights'][row] = 0
    return batch


def make_state(tx):
    params = Bigrams().init(jax.random.key(0), None)
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jnp.zeros(()))


@functools.cache
def compiled(tx, settings, dropout=False):
    return jax.jit(train_step.make_train_step(Bigrams(dropout), tx, **dict(settings)))


def run(batch, tx=GRADIENT_DESCENT, **settings):
    state = make_state(tx)
    new_state, metrics = compiled(tx, tuple(settings.items()))(state, batch)
    return state, new_state, jax.tree.map(float, metrics)


def gradient(state, new_state):
    """Returns the change of the parameters, which is the gradient for gradient descent with learning rate 1."""
    return np.asarray(state.params['table'] - new_state.params['table'])


def reference_gradient(table, batch):
    """Returns the gradient of the loss sum: softmax minus one-hot, summed over equal inputs."""
    table = np.asarray(table, np.float64)
    out = np.zeros_like(table)
    for i, t, w in zip(*(batch[k].ravel() for k in ('inputs', 'targets', 'weights')), strict=True):
        probabilities = np.exp(table[i]) / np.exp(table[i]).sum()
        out[i] += w * (probabilities - np.eye(VOCAB)[t])
    return out


@pytest.mark.parametrize('factor', ['NUM_REAL_TARGET_TOKENS', None, 7.5])
def test_gradient_is_the_loss_sum_over_the_normalizer(factor):
    batch = make_batch()
    state, new_state, metrics = run(batch, loss_normalizing_factor=factor)
    expected = reference_gradient(state.params['table'], batch)
    expected /= {None: 1.0, 7.5: 7.5}.get(factor, batch['weights'].sum())
    np.testing.assert_allclose(gradient(state, new_state), expected, atol=1e-6)
    assert metrics['grad_norm'] == pytest.approx(np.sqrt(np.sum(expected**2)), rel=1e-5)
    assert metrics['weights'] == batch['weights'].sum() and new_state.step == 1
    known = {*run_metrics.STEP_METRICS, *run_metrics.COUNT_METRICS}
    assert metrics.keys() - known == {'loss'}, 'add metrics that are not sums to STEP_METRICS in run_folder/metrics.py'
    assert metrics['param_norm'] == pytest.approx(np.linalg.norm(state.params['table']), rel=1e-5)


@settings(max_examples=10, deadline=None)
@given(microbatches=st.sampled_from([2, 4, 8]), seed=st.integers(0, 99), padded=st.sets(st.integers(0, 7)))
def test_microbatches_have_the_gradient_of_the_full_batch(microbatches, seed, padded):
    batch = make_batch(seed, padded)
    state, full, full_metrics = run(batch)
    _, split, split_metrics = run(batch, microbatches=microbatches)
    np.testing.assert_allclose(gradient(state, split), gradient(state, full), atol=1e-6)
    assert split_metrics == pytest.approx(full_metrics, rel=1e-5)


def test_a_batch_of_padding_does_not_change_parameters():
    state, new_state, metrics = run(make_batch(padded_rows=range(ROWS)))
    np.testing.assert_array_equal(new_state.params['table'], state.params['table'])
    assert metrics['nonfinite'] == 0 and metrics['grad_norm'] == 0


@pytest.mark.parametrize(('bad', 'microbatches'), [(np.nan, 1), (np.inf, 2)])
def test_a_nonfinite_step_keeps_the_state_and_is_reported(bad, microbatches):
    batch = make_batch()
    batch['weights'][3, 2] = bad
    state, new_state, metrics = run(batch, optax.adam(0.1), microbatches=microbatches)
    assert metrics['nonfinite'] == 1.0
    assert new_state.step == state.step + 1
    jax.tree.map(np.testing.assert_array_equal, new_state.replace(step=state.step), state)


def test_a_spike_keeps_the_state_and_the_running_mean_of_the_loss():
    step_fn = compiled(optax.adam(0.1), (('spike_factor', 3.0),))
    state = make_state(optax.adam(0.1))
    expected = None
    for seed in range(4):
        state, metrics = step_fn(state, make_batch(seed))
        loss = metrics['loss'] / metrics['weights']
        expected = loss if expected is None else expected + train_step.USUAL_LOSS_SHARE * (loss - expected)
        assert metrics['spike'] == 0
        np.testing.assert_allclose(state.usual_loss, expected, rtol=1e-6)
    # A batch without targets has no loss.
    state, _ = step_fn(state, make_batch(padded_rows=range(ROWS)))
    np.testing.assert_allclose(state.usual_loss, expected, rtol=1e-6)
    # The same batch with parameters that predict wrong tokens with high confidence.
    wrong = state.replace(params={'table': jnp.zeros((VOCAB, VOCAB)).at[:, 0].set(100.0)})
    after, metrics = step_fn(wrong, make_batch(0))
    assert metrics['spike'] == 1 and metrics['nonfinite'] == 0 and after.step == 6
    jax.tree.map(np.testing.assert_array_equal, after.replace(step=wrong.step), wrong)


def test_dropout_depends_only_on_seed_step_and_microbatch():
    batch = {name: np.repeat(rows[-1:], ROWS, 0) for name, rows in make_batch(1).items()}

    def loss(step=0, dropout=True, **settings):
        step_fn = compiled(GRADIENT_DESCENT, tuple(settings.items()), dropout)
        return float(step_fn(make_state(GRADIENT_DESCENT).replace(step=jnp.int32(step)), batch)[1]['loss'])

    assert loss() == loss() != loss(dropout=False)
    assert len({loss(step, seed=seed) for step in (0, 1) for seed in (0, 1)}) == 4
    # Equal rows: with the same mask for both microbatches, the sum would be twice that of one microbatch.
    half = {name: rows[: ROWS // 2] for name, rows in batch.items()}
    half_loss = compiled(GRADIENT_DESCENT, (), True)(make_state(GRADIENT_DESCENT), half)[1]['loss']
    assert loss(microbatches=2) != pytest.approx(2 * float(half_loss), rel=1e-4)


def test_the_reported_learning_rate_equals_that_of_the_update():
    """A skipped step does not advance the schedule."""
    schedule = schedules.linear(1.0, 0, 10)
    tx = optax.sgd(schedule)
    step = jax.jit(train_step.make_train_step(Bigrams(), tx, learning_rate=schedule))
    state, bad = make_state(tx), make_batch()
    bad['weights'][3, 2] = np.nan
    for batch, rate in ((make_batch(), 1.0), (bad, 0.9), (bad, 0.9), (make_batch(), 0.9)):
        before = state
        state, metrics = step(before, batch)
        assert float(metrics['learning_rate']) == pytest.approx(rate)
        if batch is not bad:
            expected = reference_gradient(before.params['table'], batch) / batch['weights'].sum()
            np.testing.assert_allclose(gradient(before, state), rate * expected, atol=1e-6)
    assert state.step == 4


@pytest.mark.parametrize(
    'wrap',
    [
        lambda tx: tx,
        lambda tx: parameter_averages.average_params(tx, 0.9).make(None),
        lambda tx: trainable.restrict_to_trainable(tx, 'table').make({'table': PartitionSpec()}),
    ],
    ids=['alone', 'averaged', 'restricted'],
)
def test_transformations_may_need_the_loss(wrap):
    """`reduce_on_plateau` halves the updates after each step in which the loss does not improve."""
    tx = wrap(optax.chain(optax.sgd(0.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)))
    state = make_state(tx)
    for _ in range(3):
        state, _ = compiled(tx, ())(state, make_batch())
    assert optax.tree.get(state.opt_state, 'scale') == 0.25


def test_the_compiled_step_equals_the_plain_step_and_can_donate():
    partitioner, batch = Partitioner(), make_batch()
    plan = train_state.plan_train_state(Bigrams(), optax.adam(0.1), None, partitioner)
    step = train_step.make_train_step(Bigrams(), plan.tx)
    expected, _ = step(plan.create(jax.random.key(0)), batch)
    state = plan.create(jax.random.key(0))
    compiled = train_step.jit_train_step(step, plan.shardings, partitioner, donate=True)
    new_state, metrics = compiled(state, partitioner.shard_batch(batch))
    assert state.params['table'].is_deleted() and not new_state.params['table'].is_deleted()
    np.testing.assert_allclose(new_state.params['table'], expected.params['table'], atol=1e-6)
    evaluate = train_step.jit_eval_step(train_step.make_eval_step(Bigrams()), plan.shardings, partitioner)
    assert evaluate(new_state.params, partitioner.shard_batch(batch))['loss'] < metrics['loss']


def test_invalid_settings_are_rejected():
    for settings_, message in (
        ({'microbatches': 0}, 'MICROBATCHES must be .* at least 1, got 0; set MICROBATCHES'),
        ({'loss_normalizing_factor': 'SUM'}, "LOSS_NORMALIZING_FACTOR must be .* got 'SUM'"),
    ):
        with pytest.raises(UserError, match=message):
            train_step.make_train_step(Bigrams(), optax.sgd(1.0), **settings_)
    with pytest.raises(UserError, match='MICROBATCHES must be 1 for MODEL_TYPE = embedding, .* got 2'):
        train_step.make_train_step(SimpleNamespace(model_type='embedding'), optax.sgd(1.0), microbatches=2)


@pytest.mark.parametrize(
    ('names', 'expected'),
    [
        (('encoder_input_tokens', 'decoder_target_tokens'), 5 / 8),
        (('encoder_input_tokens', 'positive_input_tokens'), 5 / 8),
        (('decoder_input_tokens', 'decoder_target_tokens'), 4 / 4),
        (('labels',), None),
    ],
)
def test_non_padding_fraction_counts_the_inputs_and_targets_of_a_batch(names, expected):
    batch = {name: np.asarray([[5, 0, 0, 0], [6, 7, 8, 9]][index : index + 1]) for index, name in enumerate(names)}
    fraction = train_step.compute_non_padding_fraction(batch)
    assert fraction is None if expected is None else float(fraction) == expected
