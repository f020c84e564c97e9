"""Distributions of samples, and scores of sequences and choices as log-likelihoods of the model."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.models.decoding import Greedy
from remixer_t5x.models.sampling import Sampling
from tests.models import toy_generation as toy
from tests.models.tiny_models import make_seq2seq

VOCAB = 12


def compile_sampler(length, sampling):
    return jax.jit(lambda tables, rng: sampling(toy.generation(tables, length), rng))


def restricted_probabilities(logits, temperature=1.0, top_k=None, top_p=1.0) -> np.ndarray:
    """Returns the sampling distribution after temperature, top-k and top-p, in this order."""
    probabilities = np.exp(np.asarray(logits, np.float64) / temperature)
    order = np.argsort(-probabilities)
    candidates = order[:top_k]
    probabilities /= probabilities[candidates].sum()
    nucleus, mass = [], 0.0
    for token in candidates:
        if mass >= top_p:
            break
        nucleus.append(token)
        mass += probabilities[token]
    expected = np.zeros_like(probabilities)
    expected[nucleus] = probabilities[nucleus] / mass
    return expected


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'temperature': 2.0, 'top_k': 3},
        {'top_p': 0.7},
        {'temperature': 1.5, 'top_k': 5, 'top_p': 0.8},
    ],
)
def test_samples_have_the_restricted_distribution(options):
    count = 20_000
    tables = toy.make_tables(1, batch=2, vocab=6, length=1)
    actual = compile_sampler(1, Sampling(num_samples=count, **options))(tables, jax.random.key(0))
    for row in range(2):
        expected = restricted_probabilities(tables[row, 0], **options)
        counts = np.bincount(np.asarray(actual.tokens[row, :, 0]), minlength=6)
        assert np.all(counts[expected == 0] == 0)
        is_allowed = expected > 0
        assert np.all(counts[is_allowed] > 0)
        chi_square = np.sum((counts[is_allowed] - count * expected[is_allowed]) ** 2 / (count * expected[is_allowed]))
        assert chi_square < 25, chi_square  # Exceeded by chance once in 7,000, for 5 degrees of freedom.


def test_later_tokens_are_conditioned_on_earlier_tokens():
    count = 20_000
    tables = toy.make_tables(2, batch=1, vocab=3, length=2)
    actual = compile_sampler(2, Sampling(num_samples=count))(tables, jax.random.key(1))
    counts = collections.Counter(map(tuple, np.asarray(actual.tokens[0]).tolist()))
    log_probabilities = toy.log_probabilities(tables[0], 2)
    for sequence, log_probability in log_probabilities.items():
        expected = np.exp(log_probability)
        frequency = counts.pop(tuple(toy.pad(sequence, 2)), 0) / count
        assert abs(frequency - expected) < 5 * np.sqrt(expected / count) + 1e-3, sequence
    assert not counts


def test_scores_are_log_likelihoods_under_the_model():
    tables = toy.make_tables(5, batch=2, vocab=4, length=3)
    sampling = Sampling(temperature=3.0, top_k=3, num_samples=16)
    greedy = jax.jit(lambda tables: Greedy()(toy.generation(tables, 3)))
    for actual in (compile_sampler(3, sampling)(tables, jax.random.key(0)), greedy(tables)):
        for row in range(2):
            expected = {
                tuple(toy.pad(sequence, 3)): score for sequence, score in toy.log_probabilities(tables[row], 3).items()
            }
            for tokens, score in zip(actual.tokens[row].tolist(), actual.scores[row].tolist(), strict=True):
                assert abs(score - expected[tuple(tokens)]) < 1e-4


def test_a_key_for_each_sequence_makes_samples_independent_of_the_batch():
    tables = toy.make_tables(7, batch=4, vocab=5, length=4)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(3), jnp.arange(4))
    sample = compile_sampler(4, Sampling(num_samples=3))
    expected = sample(tables, keys).tokens
    order = np.asarray([2, 0])
    np.testing.assert_array_equal(sample(tables[order], keys[order]).tokens, expected[order])
    np.testing.assert_array_equal(sample(tables, jax.random.key(3)).tokens, expected)
    assert np.any(sample(tables, jax.random.key(4)).tokens != expected)
    same_table = np.repeat(tables[:1], 4, axis=0)
    rows = np.asarray(sample(same_table, jax.random.key(3)).tokens).reshape(12, 4)
    assert len(np.unique(rows, axis=0)) > 6, 'sequences or samples share their draws'


@pytest.mark.parametrize('rng', [None, np.zeros(2, np.uint32)])
def test_sampling_without_keys_is_rejected(rng):
    tables = toy.make_tables(0, batch=2, vocab=3, length=1)
    with pytest.raises(ValueError, match='jax.random.key'):
        Sampling()(toy.generation(tables, 1), rng)


def test_scores_of_samples_and_choices_equal_those_of_separate_rows():
    """Samples and choices share the encoder's output; the decoder has two runs of layers."""
    model, params = make_seq2seq('remixer', VOCAB, (2, 1))
    inputs = np.array([[3, 2, 3, 1, 0], [2, 5, 7, 9, 1]])
    choices = np.array([[[5, 1, 0], [6, 7, 1], [0, 0, 0], [2, 2, 2]], [[4, 4, 4], [1, 0, 0], [9, 1, 0], [8, 1, 0]]])
    targets = choices.reshape(8, 3)
    batch = {
        'encoder_input_tokens': np.repeat(inputs, 4, axis=0),
        'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        'decoder_target_tokens': targets,
    }
    score_choices = jax.jit(model.score_choices)
    scores = score_choices(params, inputs, choices)
    assert scores.shape == (2, 4) and scores[0, 2] == 0
    np.testing.assert_allclose(scores.reshape(-1), jax.jit(model.score)(params, batch), rtol=1e-5)
    sample = jax.jit(lambda params, batch, rng: model.generate(params, batch, 3, 1, Sampling(num_samples=4), rng))
    actual = sample(params, {'encoder_input_tokens': inputs}, jax.random.key(0))
    # The sampler treats a generated padding id as a token, `score_choices` as padding.
    has_padding = np.any((np.asarray(actual.tokens) == 0) & ~ended_before(actual.tokens), axis=-1)
    scores = np.asarray(score_choices(params, inputs, np.asarray(actual.tokens, choices.dtype)))
    assert np.sum(~has_padding) >= 4
    np.testing.assert_allclose(np.asarray(actual.scores)[~has_padding], scores[~has_padding], rtol=1e-5)


def ended_before(tokens) -> np.ndarray:
    """Returns whether an end token precedes each token."""
    is_end = np.asarray(tokens) == 1
    return np.cumsum(is_end, axis=-1) - is_end > 0
