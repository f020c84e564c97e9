"""Answers do not depend on the batch size, a last partial batch, or the mesh; and they are the model's own."""

import json

import numpy as np
import pytest

from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import predictions
from tests.support import prediction_worker
from tests.support.real_processes import Process


@pytest.fixture(scope='module')
def runs(tmp_path_factory, compiled):
    folder = tmp_path_factory.mktemp('predictions')
    answers, output = folder / 'runs.json', folder / 'output.txt'
    process = Process(prediction_worker.main, answers, output=output, devices=8, compiled=compiled)
    assert process.wait() == 0, process.output()
    return json.loads(answers.read_text())


def test_batch_size_and_mesh_change_nothing(runs):
    # 19 examples: the last batch is partial on both sides.
    found, reference = runs['mesh 8'], runs['single 4']
    assert found['predictions'] == reference['predictions']
    np.testing.assert_allclose(found['scores'], reference['scores'], rtol=2e-4, atol=2e-4)
    assert found['metrics'] == pytest.approx(reference['metrics'], rel=1e-4)


def test_the_answers_are_worth_comparing(runs):
    pairs = [tuple(pair) for pair in runs['single 4']['predictions']]
    assert len(set(pairs)) > 15 and len(pairs) == 19 and all(len(pair) == 2 for pair in pairs)
    assert len({len(text) for pair in pairs for text in pair}) > 2
    assert set(runs['single 4']['metrics']) == {'sum', 'equal', 'likelihood'}


class Counting:
    """A model whose answer to a row is its number of tokens, and which says what it was given."""

    frame = 'encoder_decoder'

    def generate(self, params, batch, max_decode_length, eos_id, decoder, rng):
        import jax.numpy as jnp

        tokens = jnp.sum(batch['encoder_input_tokens'] > 0, axis=1)[:, None, None].astype(jnp.int32)
        return jnp.pad(tokens, ((0, 0), (0, 0), (0, max_decode_length - 1))), jnp.zeros(tokens.shape[:2])

    def score(self, params, batch):
        import jax.numpy as jnp

        shifted = jnp.pad(batch['decoder_target_tokens'], ((0, 0), (1, 0)))[:, :-1]
        right = jnp.all(shifted == batch['decoder_input_tokens'], axis=1)
        return jnp.where(right, jnp.sum(batch['decoder_target_tokens'] * batch['decoder_loss_weights'], axis=1), -1.0)

    def score_choices(self, params, inputs, choices):
        import jax.numpy as jnp

        return jnp.sum(choices, axis=2) + jnp.sum(inputs, axis=1, keepdims=True)


@pytest.fixture(scope='module')
def predictor():
    return predictions.Predictor(Counting(), Partitioner(), predictions.Decoding(4, {'inputs': 64, 'targets': 6}))


def test_each_example_gets_its_own_answer(predictor):
    inputs = [[7] * length for length in (5, 60, 1, 33, 2, 40, 0)]
    assert [answer.ids[0] for answer in predictor.predict({}, inputs)] == [[5], [60], [1], [33], [2], [40], []]


def test_likelihoods_are_asked_for_shifted_targets(predictor):
    found = predictor.score({}, [[3]] * 5, [[1], [2, 3], [4, 5, 6], [9] * 6, [8, 1]])
    np.testing.assert_array_equal(found, [1, 5, 15, 54, 9])
    np.testing.assert_array_equal(predictor.rank({}, [[3], [4, 5]], [[1], [2, 2]]), [[4, 7], [10, 13]])


def test_a_batch_size_that_is_none_or_does_not_divide(monkeypatch):
    with pytest.raises(UserError, match='EVAL_BATCH_SIZE must be a whole number of at least 1, got 0'):
        predictions.Decoding(0, {'inputs': 4, 'targets': 4})
    partitioner = Partitioner()
    monkeypatch.setattr(Partitioner, 'batch_shards', 3)
    with pytest.raises(UserError, match='batch size 4 does not divide'):
        predictions.Predictor(Counting(), partitioner, predictions.Decoding(4, {'inputs': 4, 'targets': 4}))
