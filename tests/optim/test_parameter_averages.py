"""EMA against its formula, averages in checkpoints, and invalid settings."""

import jax
import numpy as np
import optax
import pytest
from etils import epath

from remixer_t5x.checkpoints import checkpoint_manager, saved_params
from remixer_t5x.data.prefetch import DataPosition
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.optim import optimizer, parameter_averages, train_state, trainable
from tests.optim.optimizer_worker import Layers

DECAY = 0.5


def states(rule, steps=3):
    """Yields the plan and the train state after each step."""
    plan = train_state.plan_train_state(Layers(), rule, None, Partitioner())
    state = plan.create(jax.random.key(0))
    update = jax.jit(plan.tx.update)
    for _ in range(steps):
        trained, frozen = trainable.split_params(state.params, rule.trainable)
        updates, opt_state = update(jax.tree.map(np.ones_like, trained), state.opt_state, state.params)
        params = trainable.join_params(optax.apply_updates(trained, updates), frozen)
        state = state.replace(params=params, opt_state=opt_state)
        yield plan, state


def test_the_average_follows_its_formula_and_does_not_change_updates():
    rule = parameter_averages.average_params(optimizer.adamw(0.1), DECAY)
    expected = states(rule).send(None)[0].create(jax.random.key(0)).params['wi']
    plain = states(optimizer.adamw(0.1))
    for step, (_, state) in enumerate(states(rule), 1):
        np.testing.assert_array_equal(state.params['wi'], next(plain)[1].params['wi'])
        decay = min(DECAY, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * state.params['wi']
        actual = rule.evaluated(state.opt_state, state.params)['wi']
        np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize(
    'rule',
    [
        optimizer.adamw(0.1),
        parameter_averages.average_params(optax.sgd(0.1), DECAY),
        parameter_averages.schedule_free_adamw(0.1),
        optimizer.as_optimizer(optax.contrib.schedule_free_sgd(0.1)),
        trainable.restrict_to_trainable(parameter_averages.average_params(optax.sgd(0.1), DECAY), 'wi'),
        trainable.restrict_to_trainable(parameter_averages.schedule_free_adamw(0.1), 'wi'),
    ],
    ids=[
        'no average',
        'average',
        'schedule-free',
        'schedule-free of optax',
        'average of a subset',
        'schedule-free of a subset',
    ],
)
def test_checkpoints_contain_the_evaluated_parameters(rule, tmp_path):
    *_, (plan, state) = states(rule)
    checkpoints = checkpoint_manager.RunCheckpoints(epath.Path(tmp_path))
    checkpoints.save(3, state, DataPosition.create_at_start(1), {})
    checkpoints.close()
    restored = saved_params.restore_params(str(tmp_path), plan.abstract.params)
    expected = rule.evaluated(state.opt_state, state.params) if rule.evaluated else state.params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), restored, dict(expected))
    # A subset of the parameters, as for a model with a new head.
    subset = saved_params.open_checkpoint(str(tmp_path)).read({'wi': plan.abstract.params['wi']})
    np.testing.assert_allclose(subset['wi'], expected['wi'], rtol=1e-6)


def test_invalid_averages_are_rejected():
    with pytest.raises(UserError, match='EMA_DECAY must be .* above 0 and below 1.* got 1'):
        parameter_averages.average_params(optimizer.adamw(0.1), 1)
    with pytest.raises(UserError, match='EMA_DECAY must be None .* got 0.9; pass --gin.EMA_DECAY=None'):
        parameter_averages.average_params(parameter_averages.schedule_free_adamw(0.1), 0.9)
