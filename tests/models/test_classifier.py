"""Losses and poolings of classifiers equal their equations."""

import dataclasses

import jax
import numpy as np
import pytest

from remixer_t5x.devices.partition import unbox
from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture import encoder_only
from tests.support import hf_folders

LABELS = ('no', 'maybe', 'yes')
LENGTH = 10


def compile_model(labels):
    """Returns random parameters, and the compiled loss and `classify`, of a tiny BERT."""
    model = hf_folders.bert_model('model_types/classifier.gin', LABELS=labels)
    shapes = {'encoder_input_tokens': (4, LENGTH)}
    params = unbox(jax.jit(lambda key: model.init(key, shapes))(jax.random.key(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: np.asarray(a) + 0.2 * rng.standard_normal(a.shape, np.float32), params)
    return params, jax.jit(model.loss), jax.jit(model.classify)


def make_batch(labels):
    tokens = np.random.default_rng(1).integers(3, 60, (4, LENGTH)).astype(np.int32)
    tokens[1, 6:], tokens[3] = 0, 0
    return {
        'encoder_input_tokens': tokens,
        'labels': np.asarray([*labels, 0], np.float32),
        'label_weights': np.asarray([1, 1, 1, 0], np.float32),
    }


def test_loss_is_the_cross_entropy_of_the_labels():
    params, loss, classify = compile_model(LABELS)
    examples = make_batch([2, 0, 1])
    log_p = np.asarray(classify(params, examples['encoder_input_tokens']))
    np.testing.assert_allclose(np.exp(log_p).sum(-1), 1.0, rtol=1e-5)
    value, sums = loss(params, examples)
    assert float(value) == pytest.approx(-log_p[[0, 1, 2], [2, 0, 1]].sum(), rel=1e-5)
    assert float(sums['weights']) == 3 == float(sums['sequences'])
    assert float(sums['correct']) == (log_p.argmax(-1)[:3] == [2, 0, 1]).sum()


def test_regression_loss_is_the_squared_error():
    params, loss, classify = compile_model(None)
    examples = make_batch([0.5, -1.0, 3.8])
    numbers = np.asarray(classify(params, examples['encoder_input_tokens']))
    assert numbers.shape == (4, 1)
    assert float(loss(params, examples)[0]) == pytest.approx(((numbers[:3, 0] - [0.5, -1.0, 3.8]) ** 2).sum(), rel=1e-5)


@pytest.mark.parametrize('pool', [encoder_only.mean_of_tokens, encoder_only.first_token])
def test_poolings_ignore_padding(pool):
    ctx = dataclasses.make_dataclass('Ctx', ['is_token'])(np.arange(4)[None] < 3)
    hidden = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    expected = hidden[:, :3].mean(1) if pool is encoder_only.mean_of_tokens else hidden[:, 0]
    np.testing.assert_allclose(pool(hidden, ctx), expected)


@pytest.mark.parametrize('labels', [('yes',), ('a', 'a'), 'ab', (0, 1)])
def test_invalid_labels_raise(labels):
    with pytest.raises(UserError, match='LABELS'):
        compile_model(labels)
