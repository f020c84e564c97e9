"""Frozen parameters have no gradient, state or update; trained parameters get the same updates as without freezing."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from remixer_t5x import build_model
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.models import lora
from remixer_t5x.optim import optimizer, train_state, train_step, trainable
from tests.support import saved_run, tiny_training

SHAPES = {name: (2, 6) for name in ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')}
NAMES = 'kernel'
MODEL = tiny_training.TinyModel()


def make_plan_and_step(names=NAMES):
    rule = trainable.restrict_to_trainable(optimizer.adafactor(0.1), names)
    plan = train_state.plan_train_state(MODEL, rule, SHAPES, Partitioner())
    return plan, train_step.make_train_step(MODEL, plan.tx, trainable=rule.trainable)


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    arrays = {name: rng.integers(1, 384, shape).astype(np.int32) for name, shape in SHAPES.items()}
    return {**arrays, 'decoder_loss_weights': np.ones(SHAPES['decoder_target_tokens'], np.int32)}


def by_name(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.fixture(scope='module')
def run():
    """Returns a plan, its compiled step, the initial state, and the state and metrics after one step."""
    plan, step = make_plan_and_step()
    step, state = jax.jit(step), plan.create(jax.random.key(0))
    return plan, step, state, *step(state, make_batch())


@pytest.mark.quick
def test_only_trained_parameters_change_and_have_state(run):
    plan, _, before, after, metrics = run
    for name, array in by_name(jax.device_get(after.params)).items():
        assert (NAMES in name) != np.array_equal(array, by_name(before.params)[name]), name
    moments = [name for name, leaf in by_name(after.opt_state).items() if leaf.ndim]
    assert moments and all(NAMES in name for name in moments)
    assert metrics['grad_norm'] > 0 and jax.tree.structure(after) == jax.tree.structure(plan.abstract)


def test_updates_equal_those_of_training_all_parameters(run):
    plan, step = make_plan_and_step(None)
    state, _ = jax.jit(step)(plan.create(jax.random.key(0)), make_batch())
    expected = by_name(trainable.split_params(jax.device_get(state.params), NAMES)[0])
    for name, array in by_name(trainable.split_params(jax.device_get(run[3].params), NAMES)[0]).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_gradients_of_frozen_parameters_are_not_computed():
    def scatters(names):
        # Only the gradients of the embedding lookups are scatters in the step of this model.
        plan, step = make_plan_and_step(names)
        return str(jax.make_jaxpr(step)(plan.abstract, make_batch())).count('scatter-add[')

    assert scatters('logits') < scatters(None)


@pytest.mark.parametrize('names', ['b/c', '.'])
def test_split_and_join_of_parameters_are_inverse(names):
    params = {'a': 1, 'b': {'c': 2, 'd': {'e': 3}}}
    trained, frozen = trainable.split_params(params, names)
    assert trained == ({'b': {'c': 2}} if names == 'b/c' else params)
    assert trainable.join_params(trained, frozen) == params


@pytest.mark.parametrize(
    ('names', 'words'),
    [('mixr', "must match the name .*kernel.*, got 'mixr'"), ('(', 'must be a regular expression')],
)
def test_invalid_expressions_are_rejected(names, words):
    with pytest.raises(UserError, match=words):
        make_plan_and_step(names)


@pytest.mark.parametrize(('model_type', 'heads'), [('classifier', {'head'}), ('encoder_only', set())])
def test_lora_also_trains_the_head_of_a_classifier(model_type, heads):
    """BERT's head for masked language modelling is pretrained, so it is frozen."""
    model = build_model('models/bert.gin', 'sizes/tiny.gin', f'model_types/{model_type}.gin')
    adapted = lora.with_adapters(model, 'query')
    rule = trainable.restrict_to_trainable(optimizer.adamw(0.1), lora='query', model=model)
    plan = train_state.plan_train_state(adapted, rule, SHAPES, Partitioner())
    trained, frozen = trainable.split_params(plan.abstract.params, rule.trainable)
    assert trained.keys() == {'encoder', *heads}
    assert len(by_name(trained['encoder'])) == 2 and 'head' in {**trained, **frozen} and 'token_embedder' in frozen


@pytest.mark.parametrize(
    'settings',
    [{'fresh_parameters': 'mlp/wi_0'}, {'checkpoint_map': {r'.*/wi_0/\w+': None, '(.*)/wo/(.*)': r'\1/w/\2'}}],
)
def test_lora_also_trains_parameters_that_are_not_in_the_initial_checkpoint(settings):
    model = build_model('models/t5_1_1.gin', 'sizes/tiny.gin')
    rule = trainable.restrict_to_trainable(optimizer.adamw(0.1), lora='query', model=model, **settings)
    plan = train_state.plan_train_state(lora.with_adapters(model, 'query'), rule, SHAPES, Partitioner())
    trained = by_name(trainable.split_params(plan.abstract.params, rule.trainable)[0])
    assert {name.split("'")[-4] for name in trained} == {'query', 'wi_0'}


def test_moments_are_sharded_like_trained_parameters(tmp_path):
    """Uses an abstract mesh of eight devices, adapters of all dense layers, and a trained sublayer."""
    (tmp_path / 'model.gin').write_text(saved_run.CONFIG)
    adapted = lora.with_adapters(build_model(str(tmp_path / 'model.gin')), '.', 4)
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
