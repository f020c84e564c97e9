"""Logits processors against their definitions in NumPy, and stop strings."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_t5x.models import logits_processors
from remixer_t5x.models.beam_search import BeamSearch
from remixer_t5x.models.decoding import Greedy, StopStrings
from remixer_t5x.models.sampling import Sampling
from tests.models import toy_generation as toy

VOCAB, EOS = 5, 1


def repetition_penalty(logits, tokens, step):
    return [value * (1.5 if value < 0 else 1 / 1.5) if token in tokens else value for token, value in enumerate(logits)]


def no_repeat_bigram(logits, tokens, step):
    seen = set(itertools.pairwise(tokens))
    return [-np.inf if (tokens[-1], token) in seen else value for token, value in enumerate(logits)]


def no_repeat_token(logits, tokens, step):
    return [-np.inf if token in tokens else value for token, value in enumerate(logits)]


BAD_WORDS = ((2,), (3, 4), (0, 0, 3), (0, 1, 2, 3, 4, 0, 1, 2, 3, 4))


def no_bad_words(logits, tokens, step):
    def is_bad(token):
        return any(tuple([*tokens, token][-len(word) :]) == word for word in BAD_WORDS)

    return [-np.inf if is_bad(token) else value for token, value in enumerate(logits)]


def min_new_tokens(logits, tokens, step):
    return [-np.inf if token == EOS and step < 3 else value for token, value in enumerate(logits)]


def forced_prefix(logits, tokens, step):
    forced = {0: 4, 1: 2}.get(step)
    return [value if forced in (None, token) else -np.inf for token, value in enumerate(logits)]


PROCESSORS = [
    (functools.partial(logits_processors.penalize_repetition, penalty=1.5), repetition_penalty),
    (functools.partial(logits_processors.forbid_repeated_ngrams, size=2), no_repeat_bigram),
    (functools.partial(logits_processors.forbid_repeated_ngrams, size=1), no_repeat_token),
    (functools.partial(logits_processors.forbid_repeated_ngrams, size=9), lambda logits, tokens, step: logits),
    (functools.partial(logits_processors.forbid_words, words=BAD_WORDS), no_bad_words),
    (functools.partial(logits_processors.forbid_early_end, min_new_tokens=3, eos_id=EOS), min_new_tokens),
    (functools.partial(logits_processors.force_prefix, prefix=(4, 2)), forced_prefix),
]


@pytest.mark.parametrize(('processor', 'formula'), PROCESSORS, ids=lambda value: getattr(value, '__name__', None))
def test_processor_equals_its_formula(processor, formula):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(40, VOCAB)).astype(np.float32)
    compiled = jax.jit(processor)
    for length in range(1, 7):
        tokens = rng.integers(0, VOCAB, (40, length))
        aligned = np.pad(tokens, ((0, 0), (6 - length, 0)), constant_values=-1)
        expected = [formula(*row, length - 1) for row in zip(logits.tolist(), tokens.tolist(), strict=True)]
        np.testing.assert_allclose(compiled(logits, aligned, length - 1), expected, rtol=1e-6)


def test_forced_token_that_is_forbidden_gets_the_logit_0():
    forbidden, tokens = jnp.full((1, 4), -jnp.inf), jnp.zeros((1, 1), jnp.int32)
    processed = logits_processors.force_prefix(forbidden, tokens, 0, prefix=(2,))
    np.testing.assert_array_equal(processed, [[-np.inf, -np.inf, 0, -np.inf]])


def test_processors_read_the_prompt_and_the_generated_tokens():
    calls = []

    def record(logits, tokens, step):
        jax.debug.callback(lambda *values: calls.append(values), tokens, step, ordered=True)
        return logits

    decoder = Greedy(forced_prefix=(2, 3), logits_processor=(record,))
    tokens = np.asarray(decoder(toy.generation(toy.make_tables(0, 2, 4, 3), 3)).tokens)[:, 0]
    jax.effects_barrier()
    for step, (history, index) in enumerate(calls):
        assert index == step
        expected = [[-1] * (3 - step) + [0, *row[:step]] for row in tokens.tolist()]
        np.testing.assert_array_equal(history, expected)
    assert tokens[:, :2].tolist() == [[2, 3], [2, 3]]


def test_min_p_excludes_tokens_below_a_share_of_the_largest_probability():
    logits = np.random.default_rng(0).normal(0, 2, (100, 30)).astype(np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    excluded = probabilities < 0.1 * probabilities.max(axis=1, keepdims=True)
    np.testing.assert_array_equal(
        Sampling(min_p=0.1).exclude_unlikely_tokens(logits), np.where(excluded, -np.inf, logits)
    )


TEXTS = [b'', b'', b'a', b'b', b'ab', b'ba', b'aab', '\u00e9'.encode()[:1], '\u00e9'.encode()[1:], b'c']


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.text('ab\u00e9', min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(-1, len(TEXTS)), min_size=1, max_size=12),
)
def test_stop_strings_are_found_wherever_their_tokens_begin(strings, ids):
    automaton = StopStrings.compile_automaton(strings, TEXTS)
    state, text = np.int32(0), b''
    for token in ids:
        start = len(text)
        text += TEXTS[token] if 0 <= token < len(TEXTS) else b''
        ends = range(start + 1, len(text) + 1)
        expected = any(text[:end].endswith(string.encode()) for end in ends for string in strings)
        state, is_complete = automaton.advance_states(state, np.int32(token))
        assert bool(is_complete) == expected
    assert int(automaton.compute_states_after(jnp.asarray([ids]))[0]) == int(state)


@pytest.mark.parametrize('decoder', [Greedy(), Sampling(num_samples=3), BeamSearch(beams=3)])
def test_generation_ends_with_a_stop_string(decoder):
    texts = [b'', b'', b'x', b'y', b'xy', b'z']
    generation = toy.generation(toy.make_tables(3, 8, 6, 5), 5)
    stopped = toy.generation(
        toy.make_tables(3, 8, 6, 5), 5, stop_strings=StopStrings.compile_automaton(['xy', 'zz'], texts)
    )
    decoded, unstopped = (decoder(g, jax.random.key(0)).tokens.reshape(-1, 5).tolist() for g in (stopped, generation))
    for row, unstopped_row in zip(decoded, unstopped, strict=True):
        lengths = [n for n in range(1, 6) if any(s in b''.join(texts[t] for t in row[:n]) for s in (b'xy', b'zz'))]
        assert not lengths or not any(row[lengths[0] :])
        if not isinstance(decoder, BeamSearch):
            assert row == (unstopped_row[: lengths[0]] + [0] * (5 - lengths[0]) if lengths else unstopped_row)
    assert decoded != unstopped


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'bad_words_ids': [5]}, 'BAD_WORDS_IDS must be lists of ids, .* got .5,'),
        ({'bad_words_ids': [[9]]}, 'BAD_WORDS_IDS must contain ids from 0 to 3, got 9'),
        ({'bad_words_ids': [['a']]}, "BAD_WORDS_IDS must be lists of ids, .* got ..'a',"),
        ({'forced_prefix': [[2, 3]]}, 'FORCED_PREFIX must be a list of ids, .* got ..2, 3.,'),
        ({'logits_processor': no_repeat_bigram}, 'LOGITS_PROCESSOR must be a list of functions, got <function'),
        ({'logits_processor': [3]}, 'LOGITS_PROCESSOR must be a list of functions, got .3,'),
    ],
)
def test_invalid_option_raises_an_error(options, message):
    with pytest.raises(UserError, match=message):
        Greedy(**options)(toy.generation(toy.make_tables(0, 1, 4, 2), 2))
    for stop in ('', 5):
        with pytest.raises(UserError, match='STOP_STRINGS must be texts with at least 1 character, got .*x'):
            StopStrings.compile_automaton(['x', stop], TEXTS)


def test_repr_of_a_decoder_contains_the_options_that_are_set():
    assert repr(Greedy()) == 'Greedy()'
    decoder = Sampling(top_k=2, no_repeat_ngram_size=3, bad_words_ids=[[1, 2]])
    assert repr(decoder).startswith(
        'Sampling(no_repeat_ngram_size=3, bad_words_ids=((1, 2),), temperature=1.0, top_k=2'
    )
    assert hash(decoder) == hash(Sampling(top_k=2, no_repeat_ngram_size=3, bad_words_ids=[[1, 2]]))
