"""Masked language models: loss, logits of predicted tokens only, token types and padding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x import build_model
from remixer_t5x.devices.partition import unbox
from remixer_t5x.models import interface
from remixer_t5x.models.losses import CrossEntropy
from tests.support import hf_folders

LENGTH, VOCAB = 16, 60


def make_batch(targets_per_row, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, VOCAB, (len(targets_per_row), LENGTH)).astype(np.int32)
    targets = np.zeros_like(tokens)
    for row, count in enumerate(targets_per_row):
        targets[row, rng.permutation(LENGTH)[:count]] = rng.integers(3, VOCAB, count)
    return {
        'encoder_input_tokens': tokens,
        'encoder_target_tokens': targets,
        'encoder_loss_weights': (targets > 0).astype(np.int32),
    }


@pytest.fixture(scope='module')
def bert():
    model = dataclasses.replace(hf_folders.bert_model(), loss_function=CrossEntropy(z_loss=0.0))
    params = unbox(jax.jit(lambda key: model.init(key, {'encoder_input_tokens': (1, 4)}))(jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: np.asarray(a) + 0.2 * rng.standard_normal(a.shape, np.float32), params)
    return model, params


@pytest.fixture(scope='module')
def losses(bert):
    """Returns (params, batch) -> loss and gradients, loss and gradients from all logits, and the logits."""
    model, _ = bert
    complete_model = dataclasses.replace(model, predicted_share=1.0)

    @jax.jit
    def run(params, batch):
        partial, complete = (jax.value_and_grad(m.loss, has_aux=True)(params, batch) for m in (model, complete_model))
        return partial, complete, model.logits(params, batch)

    return run


@pytest.mark.parametrize('targets', [(3, 1, 0), (4, 9, 2)], ids=['few', 'more than a quarter'])
def test_loss_is_the_sum_over_targets(bert, losses, targets):
    examples = make_batch(targets)
    ((loss, sums), gradients), (_, all_gradients), logits = losses(bert[1], examples)
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = examples['encoder_target_tokens']
    log_likelihood = np.take_along_axis(log_p, labels[..., None], -1)[..., 0]
    assert float(loss) == pytest.approx(-log_likelihood[labels > 0].sum(), rel=1e-5)
    assert float(sums['weights']) == sum(targets) and float(sums['sequences']) == 3
    assert float(sums['correct']) == (log_p.argmax(-1) == labels)[labels > 0].sum()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), gradients, all_gradients)


def test_only_the_logits_of_the_predicted_share_are_computed():
    def count_matmuls(share):
        """Returns the number of products with the logits of all tokens, and of a quarter of the tokens."""
        model = dataclasses.replace(hf_folders.bert_model(), predicted_share=share)
        params = unbox(interface.compute_param_shapes(model, {'encoder_input_tokens': (1, 4)}))
        program = str(jax.make_jaxpr(model.loss)(params, make_batch((3,))))
        return [program.count(f':f32[{rows},{VOCAB}] = dot_general') for rows in (LENGTH, LENGTH // 4)]

    assert count_matmuls(1.0) == [1, 0]
    assert count_matmuls(0.25) == [1, 1]


def test_tied_output_without_head_starts_with_small_logits():
    model = build_model('models/t5_1_1.gin', 'sizes/tiny.gin', 'model_types/encoder_only.gin', NUM_ENCODER_LAYERS=1)
    batch = make_batch((2, 2))

    @jax.jit
    def logits_std(key):
        params = unbox(model.init(key, {'encoder_input_tokens': (2, LENGTH)}))
        return jnp.std(model.logits(params, batch))

    assert 0.5 < logits_std(jax.random.key(0)) < 2.0


def test_token_types_and_padding(bert):
    model, params = bert
    tokens = np.pad(make_batch((0, 0))['encoder_input_tokens'][:, :9], ((0, 0), (0, 7)))
    types = np.where(np.arange(LENGTH) < 5, 0, 1)[None].repeat(2, 0)
    encode = jax.jit(model.encode)
    plain, typed = encode(params, tokens), encode(params, tokens, types)
    assert not np.allclose(plain[:, :9], typed[:, :9])
    np.testing.assert_allclose(encode(params, tokens, 0 * types)[:, :9], plain[:, :9], atol=1e-6)
    np.testing.assert_allclose(encode(params, tokens[:, :9]), plain[:, :9], atol=2e-5)
