"""Beam search against exhaustive search and Hugging Face's `generate`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.models import beam_search
from remixer_t5x.models.beam_search import BeamSearch, BrevityPenalty, PowerPenalty
from remixer_t5x.models.decoding import Greedy
from tests.models import toy_generation as toy
from tests.models.tiny_models import make_seq2seq, make_t5, t5_params
from tests.support import references
from tests.support.paths import GOLDEN

# Values of `early_stopping` in Hugging Face's `generate`.
STOP_RULES = {
    'never': beam_search.continue_until_settled,
    'False': beam_search.continue_until_unlikely,
    'True': beam_search.continue_until_enough_finished,
}
seeds = st.integers(0, 10**6)
examples = settings(max_examples=20, deadline=None, derandomize=True, database=None)


def best_sequences(log_probabilities, penalty, count, length):
    """Returns the tokens and scores of the `count` best sequences."""
    scores = {tokens: value / float(penalty(len(tokens))) for tokens, value in log_probabilities.items()}
    best = sorted(scores, key=scores.get, reverse=True)[:count]
    return [list(tokens) + [0] * (length - len(tokens)) for tokens in best], [scores[tokens] for tokens in best]


def assert_equals_exhaustive(actual, log_probabilities, penalty):
    """Compares all beams of one input with the best sequences of `log_probabilities`."""
    tokens, scores = np.asarray(actual.tokens), np.asarray(actual.scores)
    expected_tokens, expected_scores = best_sequences(log_probabilities, penalty, *tokens.shape)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-4, atol=1e-5)
    differs_from_next = np.abs(np.diff(expected_scores)) > 1e-4
    is_untied = np.append(differs_from_next, False) & np.append(True, differs_from_next)
    np.testing.assert_array_equal(tokens[is_untied], np.asarray(expected_tokens)[is_untied])


def compile_search(length, beams, penalty=PowerPenalty, stop=beam_search.continue_until_settled):
    """Returns a compiled beam search (tables, alpha) -> DecodingResult."""

    @jax.jit
    def search(tables, alpha):
        return BeamSearch(beams, penalty(alpha), stop)(toy.generation(tables, length))

    return search


def select_row(actual, row):
    return jax.tree.map(lambda array: array[row], actual)


@pytest.mark.parametrize('penalty', [PowerPenalty, BrevityPenalty])
def test_beam_search_with_enough_beams_is_exhaustive(penalty):
    search = compile_search(3, 16, penalty)

    @examples
    @given(seeds, st.floats(-0.5, 1.5))
    def check(seed, alpha):
        tables = toy.make_tables(seed, batch=2, vocab=4, length=3)
        actual = search(tables, alpha)
        for row in range(2):
            assert_equals_exhaustive(select_row(actual, row), toy.log_probabilities(tables[row], 3), penalty(alpha))

    check()


def test_decoding_equals_exhaustive_scoring():
    model, params = make_seq2seq('remixer', 4)
    # With larger parameters, later tokens can change the ranking of prefixes.
    params = jax.tree.map(lambda x: 1.5 * x, params)
    inputs = jnp.asarray([[3, 2, 3, 1, 2], [2, 3, 0, 0, 0], [3, 3, 2, 0, 0]])
    penalty = PowerPenalty(0.6)
    decode = jax.jit(lambda params, batch: model.generate(params, batch, 3, decoder=BeamSearch(16, penalty)))
    actual = decode(params, {'encoder_input_tokens': inputs})
    sequences = toy.complete_sequences(4, 3)
    targets = jnp.asarray([toy.pad(sequence, 3) for sequence in sequences] * len(inputs))
    is_generated = jnp.asarray([toy.pad([1] * len(sequence), 3) for sequence in sequences] * len(inputs))
    repeated = jnp.repeat(inputs, len(sequences), axis=0)
    shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    logits = jax.jit(functools.partial(model.module.apply, enable_dropout=False))({'params': params}, repeated, shifted)
    by_token = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    scores = np.asarray(jnp.sum(by_token * is_generated, axis=-1)).reshape(len(inputs), -1)
    for row in range(len(inputs)):
        assert_equals_exhaustive(select_row(actual, row), dict(zip(sequences, scores[row], strict=True)), penalty)


def test_one_beam_that_stops_at_the_first_end_token_is_greedy():
    search = compile_search(4, 1, stop=beam_search.continue_until_enough_finished)
    greedy = jax.jit(lambda tables: Greedy()(toy.generation(tables, 4)))

    @examples
    @given(seeds)
    def check(seed):
        tables = toy.make_tables(seed, batch=3, vocab=5, length=4)
        actual, expected = search(tables, 0.0), greedy(tables)
        np.testing.assert_array_equal(actual.tokens, expected.tokens)
        np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-5)

    check()


def test_early_stopping_does_not_change_the_result():
    def continue_always(live, finished, length, max_length, penalty):
        return jnp.ones_like(live, bool)

    search, search_to_the_end = compile_search(6, 3), compile_search(6, 3, stop=continue_always)

    @examples
    @given(seeds, st.floats(0, 1.5))
    def check(seed, alpha):
        tables = toy.make_tables(seed, batch=8, vocab=3, length=6)
        tables[:, :, toy.EOS] += 1
        stopped, expected = search(tables, alpha), search_to_the_end(tables, alpha)
        np.testing.assert_array_equal(stopped.tokens, expected.tokens)
        np.testing.assert_allclose(stopped.scores, expected.scores)

    check()


@pytest.mark.parametrize('decoder', [BeamSearch(2, PowerPenalty(0.0)), Greedy()])
def test_decoding_stops_when_every_sequence_has_ended(decoder):
    tables = toy.make_tables(0, batch=2, vocab=3, length=6)
    tables[:, :, toy.EOS] += 8
    generation = toy.generation(tables, 6)
    steps = []

    def counted_step(tokens, cache):
        jax.debug.callback(lambda: steps.append(1))
        return generation.step(tokens, cache)

    decoder(dataclasses.replace(generation, step=counted_step))
    jax.effects_barrier()
    assert 1 <= len(steps) <= 3


def check_parity(arrays):
    weights = {name.removeprefix('weights/'): arrays[name] for name in arrays if name.startswith('weights/')}
    model, params = make_t5(decoder_layers=2), t5_params(weights, decoder_layers=2)
    batch = {'encoder_input_tokens': jnp.asarray(arrays['inputs'])}
    length = arrays['greedy'].shape[-1]
    greedy = jax.jit(lambda params, batch: model.generate(params, batch, length).tokens[:, 0])(params, batch)
    np.testing.assert_array_equal(greedy, arrays['greedy'])
    generate = {
        early_stopping: jax.jit(
            lambda params, batch, alpha, stop=stop: model.generate(
                params, batch, length, decoder=BeamSearch(4, PowerPenalty(alpha), stop)
            )
        )
        for early_stopping, stop in STOP_RULES.items()
    }
    searches = [name.removesuffix('/tokens') for name in arrays if name.endswith('/tokens')]
    assert len(searches) >= 5
    for name in searches:
        alpha, early_stopping = name.split('/')
        actual = generate[early_stopping](params, batch, float(alpha))
        np.testing.assert_array_equal(actual.tokens, arrays[f'{name}/tokens'], err_msg=name)
        np.testing.assert_allclose(actual.scores, arrays[f'{name}/scores'], rtol=1e-5, err_msg=name)


def test_equals_recorded_hugging_face_generate():
    with np.load(GOLDEN / 't5_generate.npz') as arrays:
        check_parity(dict(arrays))


def test_equals_hugging_face_generate_live():
    references.require('torch', 'transformers')
    from tests.golden import make_t5_tiny

    check_parity(make_t5_tiny.make_generate(seed=6))
