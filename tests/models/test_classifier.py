"""The classifier: its losses by the equations, its poolings, and what it refuses."""

import dataclasses

import jax
import numpy as np
import pytest

from remixer_t5x.devices.partition import unbox
from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture import pooling
from tests.support import hf_folders

LABELS = ('no', 'maybe', 'yes')
LENGTH = 10


def built(labels, **macros):
    return hf_folders.bert_model('model_types/classifier.gin', LABELS=labels, **macros)


def compiled(model):
    params = unbox(jax.jit(model.init, static_argnums=1)(jax.random.key(0), _Shapes()))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: np.asarray(a) + 0.2 * rng.standard_normal(a.shape, np.float32), params)
    return params, jax.jit(model.loss), jax.jit(model.classify)


class _Shapes(dict):
    def __init__(self):
        super().__init__(encoder_input_tokens=(4, LENGTH))

    def __hash__(self):
        return 0


def batch(labels):
    tokens = np.random.default_rng(1).integers(3, 60, (4, LENGTH)).astype(np.int32)
    tokens[1, 6:], tokens[3] = 0, 0
    return {
        'encoder_input_tokens': tokens,
        'labels': np.asarray([*labels, 0], np.float32),
        'label_weights': np.asarray([1, 1, 1, 0], np.float32),
    }


def test_the_loss_is_the_cross_entropy_of_the_labels():
    params, loss, classify = compiled(built(LABELS))
    given = batch([2, 0, 1])
    log_p = np.asarray(classify(params, given['encoder_input_tokens']))
    np.testing.assert_allclose(np.exp(log_p).sum(-1), 1.0, rtol=1e-5)
    found, sums = loss(params, given)
    assert float(found) == pytest.approx(-log_p[[0, 1, 2], [2, 0, 1]].sum(), rel=1e-5)
    assert float(sums['weights']) == 3 == float(sums['sequences'])
    assert float(sums['correct']) == (log_p.argmax(-1)[:3] == [2, 0, 1]).sum()


def test_a_regression_has_the_squared_error():
    params, loss, classify = compiled(built(None))
    given = batch([0.5, -1.0, 3.8])
    numbers = np.asarray(classify(params, given['encoder_input_tokens']))
    assert numbers.shape == (4, 1)
    assert float(loss(params, given)[0]) == pytest.approx(((numbers[:3, 0] - [0.5, -1.0, 3.8]) ** 2).sum(), rel=1e-5)


@pytest.mark.parametrize('pool', [pooling.mean_of_tokens, pooling.first_token])
def test_poolings_do_not_see_padding(pool):
    ctx = dataclasses.make_dataclass('Ctx', ['is_token'])(np.arange(4)[None] < 3)
    hidden = np.arange(8, dtype=np.float32).reshape(1, 4, 2)
    wanted = hidden[:, :3].mean(1) if pool is pooling.mean_of_tokens else hidden[:, 0]
    np.testing.assert_allclose(pool(hidden, ctx), wanted)


@pytest.mark.parametrize('labels', [('yes',), ('a', 'a'), 'ab', (0, 1)])
def test_what_is_not_a_list_of_labels_is_refused(labels):
    with pytest.raises(UserError, match='LABELS'):
        built(labels)
