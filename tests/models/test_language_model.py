"""LanguageModel: loss, scores and continuations of a decoder alone, from left to right and with a prefix.

What the sublayers do with a prefix and with prompts is in the contract of tests/models/sublayers.
"""

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
from remixer_t5x.models.language_model import LanguageModel, behind_prompts
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.losses import CrossEntropy
from remixer_t5x.models.sampling import Sampling
from remixer_t5x.models.sublayers.attention import SelfAttention
from remixer_t5x.models.sublayers.feed_forward import GatedMLP
from remixer_t5x.models.sublayers.hyper_mixer import HyperMixer
from remixer_t5x.models.sublayers.mlp_mixer import WindowMixer

VOCAB, EOS = 12, 1
# Of several lengths; the last row only fills the batch.
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
    boxed = jax.jit(lambda key: model.init(key, batch_formats.smallest_shapes('decoder_only')))(jax.random.key(3))
    return jax.tree.map(lambda leaf: 1.5 * leaf, nn.unbox(boxed))


@functools.partial(jax.jit, static_argnums=0)
def _logits(model, params, tokens, prefix):
    prefix = prefix if model.prefix else None
    return model.module.apply({'params': params}, tokens, prefix=prefix, enable_dropout=False)


def log_likely(model, params, batch) -> np.ndarray:
    """log p of each token of the vocabulary at each place of [rows, length], by all tokens at once."""
    batch = jax.device_get(batch)
    logits = np.asarray(_logits(model, params, batch['decoder_input_tokens'], batch['decoder_causal_attention'] > 0))
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@pytest.mark.parametrize(('mixer', 'prefix'), [('attention', True), ('hyper', False), ('window', False)])
def test_continuations_are_as_likely_as_they_say(mixer, prefix):
    """Against all tokens at once: greedy tokens are the most likely ones, and beams are no less likely."""
    model, length = make_model(mixer, prefix), 4
    params = make_params(model)

    def generate(params, prompts, decoder, rng=None):
        return model.generate(params, {'prompt_tokens': prompts}, length, EOS, decoder, rng)

    run = jax.jit(generate, static_argnums=2)
    greedy = jax.device_get(run(params, PROMPTS, Greedy()))
    tokens, scores = greedy.tokens[:, 0], greedy.scores[:, 0]
    likely = log_likely(model, params, behind_prompts(PROMPTS, tokens))
    for row, count in enumerate([4, 1, 2]):
        made = tokens[row]
        used = int(np.argmax(made == EOS)) + 1 if EOS in made else length
        own = likely[row, count : count + used]
        assert np.array_equal(made[:used], np.argmax(own, axis=-1)) and not np.any(made[used:])
        np.testing.assert_allclose(scores[row], own[np.arange(used), made[:used]].sum(), rtol=1e-4)
    assert not np.any(tokens[3]) and scores[3] == 0.0
    if mixer == 'window':
        return
    beams = jax.device_get(run(params, PROMPTS, BeamSearch(beams=3, length_penalty=PowerPenalty(0.0))))
    samples = jax.device_get(run(params, PROMPTS, Sampling(num_samples=3), jax.random.key(0)))
    for decoded in (beams, samples):
        likely = log_likely(
            model, params, behind_prompts(np.repeat(PROMPTS, 3, axis=0), decoded.tokens.reshape(12, -1))
        )
        for row, count in [(row, count) for row, count in enumerate([4, 1, 2]) for _ in range(3)]:
            for beam, made in enumerate(decoded.tokens[row]):
                used = int(np.argmax(made == EOS)) + 1 if EOS in made else length
                own = likely[3 * row + beam, count : count + used]
                wanted = own[np.arange(used), made[:used]].sum()
                np.testing.assert_allclose(decoded.scores[row, beam], wanted, rtol=1e-3)
    assert np.all(beams.scores[:3, 0] >= scores[:3] - 1e-4)


@pytest.mark.parametrize('prefix', [False, True])
def test_scores_and_choices_agree(prefix):
    """Three ways to the same number: one row, prompts and texts apart, and one step after another."""
    model = make_model('attention', prefix)
    params = make_params(model)
    targets = np.array([[6, 2, EOS], [9, EOS, 0], [4, 4, EOS]], np.int32)
    batch = behind_prompts(PROMPTS[:3], targets)
    likely = log_likely(model, params, batch)
    wanted = np.sum(
        np.take_along_axis(likely, np.asarray(batch['decoder_target_tokens'])[..., None], -1)[..., 0]
        * batch['decoder_loss_weights'],
        axis=1,
    )
    score = jax.jit(model.score)
    np.testing.assert_allclose(score(params, batch), wanted, rtol=1e-5)
    apart = {'prompt_tokens': PROMPTS[:3], 'decoder_target_tokens': targets}
    np.testing.assert_allclose(score(params, apart), wanted, rtol=1e-5)
    other = np.array([[7, EOS, 0]] * 3, np.int32)
    ranked = jax.jit(model.score_choices)(params, PROMPTS[:3], np.stack([other, targets], axis=1))
    np.testing.assert_allclose(ranked[:, 1], wanted, rtol=1e-4)
    loss, sums = jax.jit(model.loss)(params, batch)
    np.testing.assert_allclose(loss, -wanted.sum(), rtol=1e-5)
    assert sums['weights'] == 8 and sums['sequences'] == 3


def test_prompts_and_targets_are_joined():
    found = behind_prompts(np.array([[5, 7, 0], [0, 0, 0]], np.int32), np.array([[6, EOS], [9, EOS]], np.int32))
    assert np.asarray(found['decoder_target_tokens']).tolist() == [[5, 7, 6, EOS, 0], [9, EOS, 0, 0, 0]]
    assert np.asarray(found['decoder_input_tokens']).tolist() == [[0, 5, 7, 6, EOS], [0, 9, EOS, 0, 0]]
    assert np.asarray(found['decoder_loss_weights']).tolist() == [[0, 0, 1, 1, 0], [1, 1, 0, 0, 0]]
    assert np.asarray(found['decoder_causal_attention']).tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]


def test_packed_documents_have_the_loss_that_they_have_alone():
    model = make_model(tied=False)
    params = make_params(model)
    rows = [[5, 7, 2, EOS], [3, 9, EOS]]

    def batch(targets, starts):
        targets = np.asarray([targets], np.int32)
        inputs = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
        inputs[:, starts] = 0
        return {'decoder_target_tokens': targets, 'decoder_input_tokens': inputs}

    loss_of = jax.jit(model.loss)
    alone = sum(float(loss_of(params, batch(row, [0]))[0]) for row in rows)
    packed = batch([*rows[0], *rows[1], 0], [0, 4])
    packed['decoder_segment_ids'] = np.array([[1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    packed['decoder_positions'] = np.array([[0, 1, 2, 3, 0, 1, 2, 0]], np.int32)
    loss, sums = loss_of(params, packed)
    np.testing.assert_allclose(loss, alone, rtol=1e-5)
    assert sums['sequences'] == 2


def test_what_cannot_be_done_is_refused_in_one_line():
    model = make_model('attention', True)
    with pytest.raises(UserError, match='PREFIX_LM is True and the task has targets alone'):
        model.loss(make_params(model), {'decoder_input_tokens': PROMPTS, 'decoder_target_tokens': PROMPTS})
    with pytest.raises(UserError, match='WindowMixer cannot read a prefix'):
        make_params(make_model('window', True))
    with pytest.raises(UserError, match='encodes text, and MODEL_TYPE = .decoder_only. has none') as error:
        interface.require(model, 'encode', 'infer --embed')
    assert '\n' not in str(error.value)
    interface.require(model, 'generate', 'infer')
    with pytest.raises(UserError, match='fill_in requires a model of type encoder_decoder'):
        interface.require_type(model, 'encoder_decoder', 'fill_in')
