"""The arrays of the pictures equal those that the sublayers compute with."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import linen as nn

from remixer_t5x.context import make_sequence_context
from remixer_t5x.devices.partition import unbox
from remixer_t5x.extras.reports.pictures import learned_weights
from remixer_t5x.extras.reports.pictures.learned_weights import DECODER, ENCODER
from remixer_t5x.models import interface
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack, dots_remat
from remixer_t5x.models.layers import cached_attention
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers import attention, gmlp, remixer, tim

LENGTH, WIDTH = 6, 8
_SELF = functools.partial(attention.SelfAttention, num_heads=2, head_dim=4)
_CROSS = functools.partial(attention.CrossAttention, num_heads=2, head_dim=4)
_TIM = functools.partial(tim.TimAttention, num_mechanisms=2, num_heads=2, head_dim=4)
_REMIXER = functools.partial(remixer.Remixer, hidden_dim=4, max_length=LENGTH)


def _model():
    """Returns a model with runs of one and two layers, so that layers are counted over runs and within them."""
    encoder = functools.partial(PreNorm, sublayers=(_SELF, _REMIXER))
    tim_layer = functools.partial(PreNorm, sublayers=(_TIM,))
    decoder = functools.partial(PreNorm, sublayers=(_SELF, _CROSS, _REMIXER))
    stacks = (
        functools.partial(Stack, runs=((encoder, 1), (tim_layer, 2), (encoder, 1)), remat_policy=dots_remat),
        functools.partial(Stack, runs=((decoder, 2),)),
    )
    return Seq2Seq(EncoderDecoder(16, WIDTH, *stacks))


def _randomize(params, seed=1):
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return tree.unflatten([jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for leaf in leaves])


@pytest.fixture(scope='module')
def observed():
    """Returns a model, random parameters, ids of inputs and targets, and the sown intermediates."""
    model = _model()
    shapes = {'encoder_input_tokens': (1, LENGTH), 'decoder_target_tokens': (1, 4)}
    params = _randomize(unbox(interface.compute_param_shapes(model, shapes)))
    inputs, targets = np.asarray([3, 4, 5, 3, 7], np.int32), np.asarray([2, 9, 1], np.int32)
    return model, params, inputs, targets, learned_weights.read_intermediates(model, params, inputs, targets)


def test_layers_are_counted_over_runs_and_within_them(observed):
    _, params, *_, intermediates = observed
    layers = learned_weights.collect_attention_maps(intermediates, params)
    maps = [(layer.stack, layer.layer, layer.sublayer) for layer in layers]
    kinds = ('self_attention', 'tim_attention', 'tim_attention', 'self_attention')
    assert maps[:4] == [(ENCODER, number, kind) for number, kind in enumerate(kinds, 1)]
    assert sorted(maps[4:]) == [(DECODER, n, f'{kind}_attention') for n in (1, 2) for kind in ('cross', 'self')]
    logits = [(layer.stack, layer.layer) for layer in learned_weights.collect_remixer_logits(params)]
    assert logits == [(ENCODER, 1), (ENCODER, 4), (DECODER, 1), (DECODER, 2)]
    assert [layer.layer for layer in learned_weights.collect_competition_weights(intermediates, params)] == [2, 3]


def test_weights_are_distributions_over_mechanisms_and_visible_tokens(observed):
    _, params, inputs, targets, intermediates = observed
    for layer in learned_weights.collect_competition_weights(intermediates, params):
        assert layer.array.shape == (2, len(inputs))
        np.testing.assert_allclose(layer.array.sum(axis=0), 1, atol=1e-6)
    sizes = {'self_attention': len(targets), 'cross_attention': len(inputs)}
    for layer in learned_weights.collect_attention_maps(intermediates, params):
        np.testing.assert_allclose(layer.array.sum(axis=-1), 1, atol=1e-5)
        if layer.stack == DECODER:
            assert layer.array.shape == (2, len(targets), sizes[layer.sublayer])
        if layer.stack == DECODER and layer.sublayer == 'self_attention':
            assert np.all(np.triu(layer.array, 1) == 0)


def test_sown_weights_times_the_values_are_the_output():
    """The value and output projections of the single head are identities, so its output equals its weights."""
    module = attention.SelfAttention(num_heads=1, head_dim=LENGTH)
    x = jnp.eye(LENGTH)[None]
    ctx = make_sequence_context(jnp.ones((1, LENGTH), jnp.int32), causal=True)
    params = _randomize(unbox(module.init(jax.random.key(0), x, ctx)['params']))
    for name in ('value', 'out'):
        params[name]['kernel'] = jnp.eye(LENGTH)
    bias = jax.random.normal(jax.random.key(2), (1, 1, LENGTH, LENGTH))
    ctx = dataclasses.replace(ctx, position_bias=bias)
    output, state = module.apply({'params': params}, x, ctx, mutable=['intermediates'])
    np.testing.assert_allclose(state['intermediates']['attention_weights'][0][0, 0], output[0], atol=1e-5)


@pytest.mark.parametrize('causal', [False, True])
def test_mixing_weights_of_the_layer_are_the_softmax_of_h(causal):
    """Mixing one-hot tokens gives the rows of softmax(H), as SciPy's softmax does."""
    module = remixer.LearnedMixing(max_length=9)
    x = jnp.eye(LENGTH)[None]
    ctx = make_sequence_context(jnp.ones((1, LENGTH), jnp.int32), causal=causal)
    params = _randomize(unbox(module.init(jax.random.key(0), x, ctx)['params']))
    logits = np.asarray(params['logits'])
    weights = learned_weights.compute_softmax_rows(logits, LENGTH, causal)
    np.testing.assert_allclose(weights, module.apply({'params': params}, x, ctx)[0], atol=1e-6)
    masked = np.where(np.tri(LENGTH) > 0, logits[:LENGTH, :LENGTH], -np.inf) if causal else logits[:LENGTH, :LENGTH]
    np.testing.assert_allclose(weights, scipy.special.softmax(masked, axis=-1), atol=1e-6)


@pytest.mark.parametrize(('weights', 'stack'), [(gmlp.ToeplitzSpatial, DECODER), (gmlp.FreeSpatial, ENCODER)])
def test_spatial_weights_equal_those_of_the_layer(weights, stack):
    module = weights(max_length=9)
    ctx = make_sequence_context(jnp.ones((1, LENGTH), jnp.int32), causal=stack == DECODER)
    params = _randomize(unbox(module.init(jax.random.key(0), LENGTH, ctx)['params']))
    tree = {'run_0': {'layer': {'gmlp': {'mixing': {'weights': jax.tree.map(lambda leaf: leaf[None], params)}}}}}
    (layer,) = learned_weights.collect_spatial_weights({stack: tree}, {stack: LENGTH})
    np.testing.assert_array_equal(layer.array, module.apply({'params': params}, LENGTH, ctx))


def test_sowing_does_not_change_a_training_step(observed, monkeypatch):
    """The program of loss and gradient is identical with and without the code that sows."""
    model, params, *_ = observed
    tokens = jnp.ones((2, LENGTH), jnp.int32)
    batch = {name: tokens for name in ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')}

    def program():
        text = str(jax.make_jaxpr(jax.grad(lambda params: model.loss(params, batch)[0]))(params))
        return re.sub(r'0x[0-9a-f]+', '', text)

    with_sowing = program()
    monkeypatch.setattr(cached_attention, '_sow_attention_weights', lambda *args: None)
    monkeypatch.setattr(nn.Module, 'sow', lambda *args, **kwargs: False)
    jax.clear_caches()
    assert program() == with_sowing
