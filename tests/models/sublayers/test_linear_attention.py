"""Linear attention against its authors' PyTorch package, and packed rows against the quadratic formula."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.context import EncoderMemory
from remixer_t5x.models.sublayers import linear_attention
from tests.models.sublayers.sublayer_inputs import context_of_ids

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / 'golden' / 'linear_attention.npz')
HEADS, HEAD_DIM, LENGTH = 3, 5, 21


def golden_context(**flags):
    return context_of_ids(np.arange(LENGTH) < GOLDEN['lengths'][:, None], **flags)


def golden_weights():
    return {name: {'kernel': jnp.asarray(GOLDEN[f'weights/{name}'])} for name in ('query', 'key', 'value', 'out')}


@pytest.mark.parametrize('form', ['bidirectional', 'causal'])
def test_linear_attention_equals_the_authors_package(form, monkeypatch):
    monkeypatch.setattr(linear_attention, 'CHUNK', 4)
    layer = linear_attention.LinearAttention(HEADS, HEAD_DIM)
    apply = jax.jit(lambda params, x, ctx: layer.apply({'params': params}, x, ctx))
    # With `packed`, the bidirectional form is computed in chunks as well.
    for packed in (False, True):
        ctx = golden_context(causal=form == 'causal', packed=packed)
        actual = apply(golden_weights(), jnp.asarray(GOLDEN['x']), ctx)
        for row, length in enumerate(GOLDEN['lengths']):
            np.testing.assert_allclose(actual[row, :length], GOLDEN[form][row, :length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('packed', [False, True])
def test_cross_form_equals_the_authors_package(packed):
    memory = EncoderMemory(jnp.asarray(GOLDEN['x']), golden_context(packed=packed))
    ctx = context_of_ids(np.ones((3, 4)), causal=True, packed=packed, memory=memory)
    layer = linear_attention.LinearCrossAttention(HEADS, HEAD_DIM)
    actual = jax.jit(layer.apply)({'params': golden_weights()}, jnp.asarray(GOLDEN['queries']), ctx)
    np.testing.assert_allclose(actual, GOLDEN['cross'], rtol=1e-5, atol=1e-5)


@st.composite
def packed_rows(draw, rows=2, length=LENGTH):
    """Draws ids of contiguous examples of any lengths, followed by padding."""
    ids = np.zeros((rows, length), np.int32)
    for row in ids:
        ends = sorted(draw(st.sets(st.integers(1, length), min_size=1, max_size=6)))
        for start, end, index in zip([0, *ends[:-1]], ends, range(len(ends)), strict=True):
            row[start:end] = index + 1
    return ids


@pytest.mark.parametrize(('chunk', 'causal'), [(1, True), (4, True), (4, False)])
def test_chunks_of_packed_rows_equal_the_quadratic_formula(chunk, causal, monkeypatch):
    monkeypatch.setattr(linear_attention, 'CHUNK', chunk)
    rng = np.random.default_rng(0)
    query, key, value = rng.uniform(0.1, 2, size=(3, 2, LENGTH, HEADS, HEAD_DIM))
    attend = jax.jit(lambda *arguments: linear_attention.linear_attention(*arguments))
    arrays = [jnp.asarray(array, jnp.float32) for array in (query, key, value)]

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(packed_rows())
    def check(ids):
        weights = np.einsum('bqhd,bkhd->bhqk', query, key)
        allowed = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, None, :]
        if causal:
            allowed &= np.tri(LENGTH, dtype=bool)
        weights = weights * allowed[:, None]
        expected = np.einsum('bhqk,bkhd->bqhd', weights, value)
        expected /= np.maximum(np.swapaxes(weights.sum(-1), 1, 2), 1e-9)[..., None]
        actual = attend(*arrays, context_of_ids(ids, causal=causal, packed=True))
        np.testing.assert_allclose(actual[ids > 0], expected[ids > 0], rtol=2e-5)
        assert np.all(np.isfinite(actual))

    check()


@pytest.mark.parametrize('flags', [{'causal': True}, {'packed': True}], ids=str)
def test_memory_is_linear_in_length(flags):
    layer = linear_attention.LinearAttention(2, 16)

    def temporary_bytes(length):
        x = jnp.ones((1, length, 32))
        ctx = context_of_ids(np.ones((1, length)), **flags)
        params = nn.unbox(layer.init(jax.random.key(0), x, ctx)['params'])

        def loss(params, x, ctx):
            return jnp.sum(layer.apply({'params': params}, x, ctx))

        return jax.jit(jax.grad(loss)).lower(params, x, ctx).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(2048) < 2.2 * temporary_bytes(1024)


def test_features_are_positive_and_have_a_gradient():
    x = jnp.array([-80.0, -20.0, 0.0, 30.0])
    assert np.all(np.asarray(linear_attention.feature_map(x)) > 0)
    gradients = jax.vmap(jax.grad(linear_attention.feature_map))(x)
    assert np.all(np.isfinite(gradients)) and np.all(np.asarray(gradients) > 0)
