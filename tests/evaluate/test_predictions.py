"""Predictions do not depend on the batch size, a partial batch or the mesh; batches have few shapes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x import build_model
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.evaluate import predictions
from tests.evaluate import prediction_worker
from tests.support.real_processes import Process


def test_predictions_do_not_depend_on_batch_size_or_mesh(tmp_path):
    """19 examples: the last batch is partial in both runs."""
    process = Process(prediction_worker.main, tmp_path / 'runs.json', output=tmp_path / 'output.txt', devices=8)
    assert process.wait() == 0, process.output()
    runs = json.loads((tmp_path / 'runs.json').read_text())
    mesh, reference = runs['mesh 8'], runs['single 4']
    assert mesh['predictions'] == reference['predictions']
    for name in ('scores', 'likelihoods'):
        np.testing.assert_allclose(mesh[name], reference[name], rtol=2e-4, atol=2e-4)
    # The predictions differ enough for the comparison to mean something.
    pairs = [tuple(map(tuple, pair)) for pair in reference['predictions']]
    assert len(set(pairs)) > 15 and len(pairs) == 19 and all(len(pair) == 2 for pair in pairs)
    assert len({len(ids) for pair in pairs for ids in pair}) > 1


class Counting:
    """A model that answers each row with its number of tokens."""

    model_type = 'encoder_decoder'
    module = None

    def generate(self, params, batch, max_decode_length, eos_id, decoder, rng, stop_strings):
        tokens = jnp.sum(batch['encoder_input_tokens'] > 0, axis=1)[:, None, None].astype(jnp.int32)
        return jnp.pad(tokens, ((0, 0), (0, 0), (0, max_decode_length - 1))), jnp.zeros(tokens.shape[:2])

    def score(self, params, batch):
        shifted = jnp.pad(batch['decoder_target_tokens'], ((0, 0), (1, 0)))[:, :-1]
        is_shifted = jnp.all(shifted == batch['decoder_input_tokens'], axis=1)
        return jnp.where(
            is_shifted, jnp.sum(batch['decoder_target_tokens'] * batch['decoder_loss_weights'], axis=1), -1.0
        )

    def score_choices(self, params, inputs, choices):
        return jnp.sum(choices, axis=2) + jnp.sum(inputs, axis=1, keepdims=True)


@pytest.fixture(scope='module')
def predictor():
    return predictions.Predictor(Counting(), Partitioner(), predictions.Decoding(4, {'inputs': 64, 'targets': 6}))


def test_each_example_gets_its_own_answer(predictor):
    inputs = [[7] * length for length in (5, 60, 1, 33, 2, 40, 0)]
    assert [answer.ids[0] for answer in predictor.predict({}, inputs)] == [[5], [60], [1], [33], [2], [40], []]


def test_copies_of_an_example_fill_the_last_batch():
    class Shortest(Counting):
        def generate(self, params, batch, *args):
            tokens, scores = super().generate(params, batch, *args)
            return jnp.broadcast_to(tokens.min(axis=0), tokens.shape), scores

    predictor = predictions.Predictor(Shortest(), Partitioner(), predictions.Decoding(4, {'inputs': 8, 'targets': 6}))
    assert [answer.ids[0] for answer in predictor.predict({}, [[7] * 5, [7] * 3])] == [[3], [3]]


def test_likelihoods_are_of_shifted_targets(predictor):
    scores = predictor.score({}, [[3]] * 5, [[1], [2, 3], [4, 5, 6], [9] * 6, [8, 1]])
    np.testing.assert_array_equal(scores, [1, 5, 15, 54, 9])
    np.testing.assert_array_equal(predictor.score_choices({}, [[3], [4, 5]], [[1], [2, 2]]), [[4, 7], [10, 13]])


@given(st.lists(st.integers(0, 512), max_size=300), st.integers(1, 40), st.sampled_from([512, 600, 1024]))
def test_every_example_is_in_one_batch_that_is_long_enough(lengths, batch_size, longest):
    batches = predictions.plan_batches(lengths, batch_size, longest)
    assert sorted(row for rows in batches for row in rows.examples) == list(range(len(lengths)))
    for rows in batches:
        assert 1 <= len(rows.examples) <= batch_size
        assert max(lengths[row] for row in rows.examples) <= rows.length <= longest
    # Only the last batch is not full, and only the longest shape has few batches.
    assert all(len(rows.examples) == batch_size for rows in batches[:-1])
    sizes = [rows.length for rows in batches]
    for size in set(sizes) - {max(sizes, default=0)}:
        assert sizes.count(size) >= predictions.MIN_BATCHES_PER_SHAPE


def test_inputs_are_padded_to_the_full_length_if_outputs_depend_on_the_padded_length():
    files = ['models/fnet.gin', 'model_types/encoder_only.gin', 'sizes/tiny.gin']
    model = build_model(*files, VOCAB_SIZE=12, EMBED_DIM=16, NUM_ENCODER_LAYERS=1, NUM_DECODER_LAYERS=1, MLP_DIM=16)
    params = nn.unbox(model.init(jax.random.key(0), {'encoder_input_tokens': (1, 2)}))
    predictor = predictions.Predictor(model, Partitioner(), predictions.Decoding(2, {'inputs': 48, 'targets': 48}))
    inputs = [[5, 6, 7, 1], [9, 1]]
    expected = model.encode(params, jnp.asarray(predictions.pad_ids(inputs, 48)))
    for ids, hidden, row in zip(inputs, predictor.encode(params, inputs), expected, strict=True):
        np.testing.assert_allclose(hidden, row[: len(ids)], rtol=1e-4, atol=1e-4)


def test_short_examples_get_short_rows():
    lengths = [20] * 64 + [100] * 64 + [300] * 64
    sizes = [rows.length for rows in predictions.plan_batches(lengths, 8, 512)]
    assert sizes == [512] * 8 + [128] * 8 + [32] * 8
