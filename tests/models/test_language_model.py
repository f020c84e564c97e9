"""Loss, scores and continuations of decoder-only models, causal and with a bidirectional prefix."""

import functools

import jax
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from remixer_t5x.models.architecture.decoder_only import DecoderOnly
from remixer_t5x.models.architecture.layer import make_layer
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.decoding import Greedy
from remixer_t5x.models.language_model import LanguageModel, join_prompts_and_targets
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.losses import CrossEntropy
from remixer_t5x.models.sampling import Sampling
from remixer_t5x.models.sublayers.attention import SelfAttention
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from remixer_t5x.models.sublayers.hyper_mixer import HyperMixer
from remixer_t5x.models.sublayers.mlp_mixer import WindowMixer

VOCAB, EOS = 12, 1
# Prompts of several lengths; the last prompt is empty.
PROMPTS = np.array([[5, 7, 2, 9], [3, 0, 0, 0], [8, 4, 0, 0], [0, 0, 0, 0]], np.int32)


@functools.cache
def make_model(mixer: str = 'attention', prefix: bool = False, tied: bool = True) -> LanguageModel:
    mixers = {
        'attention': functools.partial(SelfAttention, 2, 4),
        'hyper': functools.partial(HyperMixer, 8),
        'window': functools.partial(WindowMixer, 4, 3),
    }
    layer = functools.partial(make_layer, (mixers[mixer], None, functools.partial(GatedMLP, 8)))
    bias = functools.partial(RelativePositionBias, 2) if mixer == 'attention' else None
    stack = functools.partial(Stack, ((layer, 2),), bias)
    return LanguageModel(DecoderOnly(VOCAB, 8, stack, tied=tied), CrossEntropy(z_loss=0.0), prefix)


@functools.cache
def make_params(model: LanguageModel):
    boxed = jax.jit(lambda key: model.init(key, batch_formats.get_smallest_batch_shapes('decoder_only')))(
        jax.random.key(3)
    )
    return jax.tree.map(lambda leaf: 1.5 * leaf, nn.unbox(boxed))


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens, prefix):
    prefix = prefix if model.prefix else None
    return model.module.apply({'params': params}, tokens, prefix=prefix, enable_dropout=False)


def log_probabilities(model, params, batch) -> np.ndarray:
    """Returns log p of each token at each position, [rows, length, vocab], computed for all tokens at once."""
    batch = jax.device_get(batch)
    logits = np.asarray(_logits(model, params, batch['decoder_input_tokens'], batch['decoder_causal_attention'] > 0))
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def expected_score(log_p, continuation):
    """Returns the number of tokens up to the end token, and the sum of their log p."""
    used = int(np.argmax(continuation == EOS)) + 1 if EOS in continuation else len(continuation)
    return used, log_p[np.arange(used), continuation[:used]].sum()


@pytest.mark.parametrize(('mixer', 'prefix'), [('attention', True), ('hyper', False), ('window', False)])
def test_scores_of_continuations_equal_teacher_forcing(mixer, prefix):
    """Greedy tokens are the most likely tokens, and the best beam is at least as likely."""
    model, length = make_model(mixer, prefix), 4
    params = make_params(model)

    def generate(params, prompts, decoder, rng=None):
        return model.generate(params, {'prompt_tokens': prompts}, length, EOS, decoder, rng)

    run = jax.jit(generate, static_argnums=2)
    greedy = jax.device_get(run(params, PROMPTS, Greedy()))
    tokens, scores = greedy.tokens[:, 0], greedy.scores[:, 0]
    log_p = log_probabilities(model, params, join_prompts_and_targets(PROMPTS, tokens))
    for row, count in enumerate([4, 1, 2, 0]):
        used, expected = expected_score(log_p[row, count:], tokens[row])
        best = np.argmax(log_p[row, count : count + used], axis=-1)
        assert np.array_equal(tokens[row, :used], best) and not np.any(tokens[row, used:])
        np.testing.assert_allclose(scores[row], expected, rtol=1e-4, atol=1e-5)
    if mixer != 'attention':
        return
    beams = jax.device_get(run(params, PROMPTS, BeamSearch(beams=3, length_penalty=PowerPenalty(0.0))))
    samples = jax.device_get(run(params, PROMPTS, Sampling(num_samples=3), jax.random.key(0)))
    for decoded in (beams, samples):
        log_p = log_probabilities(
            model, params, join_prompts_and_targets(np.repeat(PROMPTS, 3, axis=0), decoded.tokens.reshape(12, -1))
        )
        for row, count in enumerate([4, 1, 2, 0]):
            for beam, continuation in enumerate(decoded.tokens[row]):
                expected = expected_score(log_p[3 * row + beam, count:], continuation)[1]
                np.testing.assert_allclose(decoded.scores[row, beam], expected, rtol=1e-3)
    assert np.all(beams.scores[:, 0] >= scores - 1e-4)


@pytest.mark.parametrize('prefix', [False, True])
def test_scores_and_choices_agree(prefix):
    """Compares joined rows, separate prompts, and step-by-step decoding."""
    model = make_model('attention', prefix)
    params = make_params(model)
    targets = np.array([[6, 2, EOS], [9, EOS, 0], [4, 4, EOS]], np.int32)
    batch = join_prompts_and_targets(PROMPTS[:3], targets)
    log_p = log_probabilities(model, params, batch)
    expected = np.sum(
        np.take_along_axis(log_p, np.asarray(batch['decoder_target_tokens'])[..., None], -1)[..., 0]
        * batch['decoder_loss_weights'],
        axis=1,
    )
    score = jax.jit(model.score)
    np.testing.assert_allclose(score(params, batch), expected, rtol=1e-5)
    separate = {'prompt_tokens': PROMPTS[:3], 'decoder_target_tokens': targets}
    np.testing.assert_allclose(score(params, separate), expected, rtol=1e-5)
    other = np.array([[7, EOS, 0]] * 3, np.int32)
    ranked = jax.jit(model.score_choices)(params, PROMPTS[:3], np.stack([other, targets], axis=1))
    np.testing.assert_allclose(ranked[:, 1], expected, rtol=1e-4)
    loss, sums = jax.jit(model.loss)(params, batch)
    np.testing.assert_allclose(loss, -expected.sum(), rtol=1e-5)
    assert sums['weights'] == 8 and sums['sequences'] == 3


def test_prompts_and_targets_are_joined():
    joined = join_prompts_and_targets(
        np.array([[5, 7, 0], [0, 0, 0]], np.int32), np.array([[6, EOS], [9, EOS]], np.int32)
    )
    assert np.asarray(joined['decoder_target_tokens']).tolist() == [[5, 7, 6, EOS, 0], [9, EOS, 0, 0, 0]]
    assert np.asarray(joined['decoder_input_tokens']).tolist() == [[0, 5, 7, 6, EOS], [0, 9, EOS, 0, 0]]
    assert np.asarray(joined['decoder_loss_weights']).tolist() == [[0, 0, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert np.asarray(joined['decoder_causal_attention']).tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]


def test_packing_keeps_the_loss_of_documents():
    model = make_model(tied=False)
    params = make_params(model)
    rows = [[5, 7, 2, EOS], [3, 9, EOS]]

    def batch(targets, starts):
        targets = np.asarray([targets], np.int32)
        inputs = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        inputs[:, starts] = 0
        return {'decoder_target_tokens': targets, 'decoder_input_tokens': inputs}

    loss_of = jax.jit(model.loss)
    separate_loss = sum(float(loss_of(params, batch(row, [0]))[0]) for row in rows)
    packed = batch([*rows[0], *rows[1], 0], [0, 4])
    packed['decoder_segment_ids'] = np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    packed['decoder_positions'] = np.array([[0, 1, 2, 3, 0, 1, 2, 0]], np.int32)
    loss, sums = loss_of(params, packed)
    np.testing.assert_allclose(loss, separate_loss, rtol=1e-5)
    assert sums['sequences'] == 2


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda model: model.loss(make_params(model), {'decoder_input_tokens': PROMPTS}), 'PREFIX_LM must be False'),
        (lambda _: make_params(make_model('window', True)), 'WindowMixer does not support bidirectional attention'),
        (
            lambda model: interface.require_method(model, 'encode', 'infer --embed'),
            "for infer --embed, got 'decoder_only'",
        ),
    ],
    ids=['prefix', 'mixer', 'method'],
)
def test_unsupported_call_raises_a_one_line_error(call, message):
    model = make_model('attention', True)
    interface.require_method(model, 'generate', 'infer')
    with pytest.raises(UserError, match=message) as error:
        call(model)
    assert '\n' not in str(error.value)
