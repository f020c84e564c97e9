"""Pseudo-attention against finite differences, and against known Jacobians."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.context import make_sequence_context
from remixer_t5x.devices.partition import unbox
from remixer_t5x.extras.reports.pictures import learned_weights
from remixer_t5x.models.architecture.encoder_decoder import EncoderDecoder
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.architecture.stack import Stack
from remixer_t5x.models.layers.positions import RelativePositionBias
from remixer_t5x.models.seq2seq import Seq2Seq
from remixer_t5x.models.sublayers import attention, feed_forward, hyper_mixer

WIDTH, INPUTS, TARGETS = 4, np.asarray([3, 4, 5], np.int32), np.asarray([2, 1], np.int32)


def _difference_norms(function, x, step=3e-3):
    """Returns norms [outputs, inputs] of central differences of a function [inputs, embed] -> [outputs, features]."""
    x = np.asarray(x)
    function = jax.jit(function)
    norms = np.zeros((function(x).shape[0], x.shape[0]))
    for position in range(x.shape[0]):
        for feature in range(x.shape[1]):
            offset = np.zeros_like(x)
            offset[position, feature] = step
            slope = (np.asarray(function(x + offset), np.float64) - function(x - offset)) / (2 * step)
            norms[:, position] += np.sum(slope**2, axis=-1)
    return np.sqrt(norms)


@pytest.fixture(scope='module')
def trained():
    """Returns a model of attention and HyperMixer layers with random parameters."""
    self_attention = functools.partial(attention.SelfAttention, num_heads=1, head_dim=4)
    cross = functools.partial(attention.CrossAttention, num_heads=1, head_dim=4)
    hyper = functools.partial(hyper_mixer.HyperMixer, hidden_dim=4)
    mlp = functools.partial(feed_forward.GatedMLP, hidden_dim=4)
    kinds = ((self_attention, mlp), (hyper, mlp), (self_attention, cross, mlp))
    layers = [functools.partial(PreNorm, sublayers=sublayers) for sublayers in kinds]
    bias = functools.partial(RelativePositionBias, num_heads=1)
    stacks = (
        functools.partial(Stack, runs=((layers[0], 1), (layers[1], 2)), position_bias=bias),
        functools.partial(Stack, runs=((layers[2], 1),), position_bias=bias),
    )
    model = Seq2Seq(EncoderDecoder(8, WIDTH, *stacks))
    shapes = {'encoder_input_tokens': (1, 3), 'decoder_target_tokens': (1, 2)}
    params = jax.eval_shape(lambda: unbox(model.init(jax.random.key(0), shapes)))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    return model, tree.unflatten([jnp.asarray(rng.normal(size=leaf.shape) * 0.7, jnp.float32) for leaf in leaves])


def test_norms_equal_those_of_known_jacobians():
    """y = A x has the Jacobian A[i, j] times the identity, of norm |A[i, j]| sqrt(width)."""
    matrix = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    norms = learned_weights.compute_jacobian_norms(lambda x: jnp.einsum('ij,bjd->bid', matrix, x), jnp.zeros((7, 9)))
    np.testing.assert_allclose(norms, np.abs(matrix) * 3, rtol=1e-5)
    # Norms of wide tokens are estimated from random signs.
    weights = np.random.default_rng(0).normal(size=(3, 200, 200)).astype(np.float32)
    norms = learned_weights.compute_jacobian_norms(
        lambda x: jnp.einsum('jde,bje->bjd', weights, x), jnp.zeros((3, 200))
    )
    np.testing.assert_allclose(np.diag(norms), np.linalg.norm(weights, axis=(1, 2)), rtol=0.1)
    assert np.all(norms[~np.eye(3, dtype=bool)] == 0)


def test_the_map_of_a_layer_agrees_with_finite_differences(trained):
    model, params = trained
    maps = learned_weights.compute_encoder_layer_maps(model, params, INPUTS)
    assert [array.shape for array in maps] == [(3, 3)] * 3
    stack = model.module.encoder_stack()
    encoder = params['encoder']
    embedded = params['token_embedder']['embedding'][INPUTS][None]
    hidden = learned_weights._apply_stack(
        stack.clone(runs=stack.runs[:1], final_norm=None),
        {name: encoder[name] for name in ('run_0', 'position_bias')}, embedded, INPUTS,
    )[0]  # fmt: skip
    first = jax.tree.map(lambda leaf: leaf[0], encoder['run_1']['layer'])
    layer = stack.runs[1][0]()
    ctx = make_sequence_context(jnp.asarray(INPUTS)[None])
    added = _difference_norms(lambda x: layer.apply({'params': first}, x[None], ctx)[0] - x, hidden)
    np.testing.assert_allclose(maps[1], added, rtol=0.02, atol=2e-3)


def test_the_decoder_depends_on_the_text_through_the_encoder(trained):
    model, params = trained
    actual = learned_weights.compute_decoder_to_input_map(model, params, INPUTS, TARGETS)
    embedding = params['token_embedder']['embedding']

    def decode(x):
        # The text and the targets have no common id, so the targets keep their embeddings.
        table = embedding.at[INPUTS].set(x)
        variables = {'params': {**params, 'token_embedder': {'embedding': table}}}
        encoded = model.module.apply(variables, INPUTS[None], enable_dropout=False, method='encode')
        rows = (INPUTS[None], np.asarray([[0, 2]], np.int32))
        return model.module.apply(variables, encoded, *rows, enable_dropout=False, method='decode_hidden')[0]

    np.testing.assert_allclose(actual, _difference_norms(decode, embedding[INPUTS]), rtol=0.02, atol=2e-3)
