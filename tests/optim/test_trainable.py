"""Frozen parameters have no gradient, state or update; trained parameters get the same updates as without freezing."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from remixer_t5x import build_model
from remixer_t5x.data import batch_formats
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface, lora
from remixer_t5x.optim import optimizer, train_state, train_step, trainable
from tests.support import saved_run

SHAPES = {name: (2, 6) for name in ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')}
NAMES = 'gated_mlp/'


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp('models') / 'model.gin'
    path.write_text(saved_run.CONFIG)
    return build_model(str(path))


def make_plan_and_step(model, rule, names=NAMES):
    rule = trainable.restrict_to_trainable(rule, names)
    plan = train_state.plan_train_state(model, rule, SHAPES, Partitioner())
    return plan, train_step.make_train_step(model, plan.tx, trainable=rule.trainable)


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    arrays = {name: rng.integers(1, 384, shape).astype(np.int32) for name, shape in SHAPES.items()}
    return {**arrays, 'decoder_loss_weights': np.ones(SHAPES['decoder_target_tokens'], np.int32)}


def by_name(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.fixture(scope='module')
def run(model):
    """Returns a plan, its compiled step, the initial state, and the state and metrics after one step."""
    plan, step = make_plan_and_step(model, optimizer.adafactor(0.1))
    step, state = jax.jit(step), plan.create(jax.random.key(0))
    return plan, step, state, *step(state, make_batch())


@pytest.mark.quick
def test_only_trained_parameters_change_and_have_state(run):
    plan, _, before, after, metrics = run
    trained = {name for name in by_name(before.params) if 'gated_mlp' in name and 'norm' not in name}
    for name, array in by_name(jax.device_get(after.params)).items():
        assert (name in trained) != np.array_equal(array, by_name(before.params)[name]), name
    moments = [name for name, leaf in by_name(after.opt_state).items() if leaf.ndim]
    assert moments and all('gated_mlp' in name for name in moments)
    assert metrics['grad_norm'] > 0 and jax.tree.structure(after) == jax.tree.structure(plan.abstract)


def test_updates_equal_those_of_training_all_parameters(model, run):
    plan, step = make_plan_and_step(model, optimizer.adafactor(0.1), None)
    state, _ = jax.jit(step)(plan.create(jax.random.key(0)), make_batch())
    expected = by_name(trainable.split_params(jax.device_get(state.params), NAMES)[0])
    for name, array in by_name(trainable.split_params(jax.device_get(run[3].params), NAMES)[0]).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_gradients_of_frozen_parameters_are_not_computed(model):
    def scatters(names):
        # The gradient of the embedding lookup is the only scatter in the step of this model.
        plan, step = make_plan_and_step(model, optimizer.adafactor(0.1), names)
        return str(jax.make_jaxpr(step)(plan.abstract, make_batch())).count('scatter-add')

    assert scatters(NAMES) == 0 < scatters(None)


@pytest.mark.parametrize('names', [NAMES, '.'])
def test_split_and_join_of_parameters_are_inverse(model, names):
    params = interface.compute_param_shapes(model, batch_formats.get_smallest_batch_shapes(model.model_type))
    trained, frozen = trainable.split_params(params, names)
    assert trainable.join_params(trained, frozen) == params
    assert set(by_name(trained)).isdisjoint(by_name(frozen)) and by_name(trained)


@pytest.mark.parametrize(
    ('names', 'words'),
    [('mixr', "must match the name .*scale.*, got 'mixr'"), ('(', 'must be a regular expression')],
)
def test_invalid_expressions_are_rejected(model, names, words):
    with pytest.raises(UserError, match=words):
        make_plan_and_step(model, optimizer.adafactor(0.1), names)


def test_moments_are_sharded_like_trained_parameters(model):
    """Uses an abstract mesh of eight devices, adapters of all dense layers, and a trained sublayer."""
    adapted = lora.with_adapters(model, '.', 4)
    rule = trainable.restrict_to_trainable(optimizer.adamw_rms(0.1), 'lora_|gated_mlp')
    plan = train_state.plan_train_state(adapted, rule, SHAPES, Partitioner(data=2, fsdp=2, tensor=2, devices=8))
    params = {name: leaf.sharding.spec for name, leaf in by_name(plan.abstract.params).items()}
    moments = {name: leaf for name, leaf in by_name(plan.abstract.opt_state).items() if leaf.ndim}
    assert len(moments) == 2 * len(by_name(trainable.split_params(plan.abstract.params, rule.trainable)[0]))
    for name, leaf in moments.items():
        (expected,) = [spec for path, spec in params.items() if name.endswith(path)]
        assert leaf.sharding.spec == expected, name
    layer = "['encoder']['run_0']['layer']['gated_mlp']['wo']"
    assert params[f"{layer}['lora_in']"] == PartitionSpec(None, 'tensor', None)
    assert params[f"{layer}['lora_out']"] == PartitionSpec(None, None, 'fsdp')
