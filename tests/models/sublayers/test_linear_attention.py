"""Linear attention against its authors' PyTorch package, and packed rows against the quadratic formula."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.context import Memory, SequenceContext
from remixer_t5x.models.sublayers import linear_attention
from tests.models.sublayers.sublayer_inputs import context_of_ids

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / 'golden' / 'linear_attention.npz')
HEADS, HEAD_DIM, LENGTH = 3, 5, 21


def golden_context(**flags):
    return context_of_ids(np.arange(LENGTH) < GOLDEN['lengths'][:, None], **flags)


def golden_weights():
    return {name: {'kernel': jnp.asarray(GOLDEN[f'weights/{name}'])} for name in ('query', 'key', 'value', 'out')}


@pytest.mark.parametrize('chunk', [4, 128])
@pytest.mark.parametrize('form', ['bidirectional', 'causal'])
def test_linear_attention_equals_the_authors_package(form, chunk, monkeypatch):
    monkeypatch.setattr(linear_attention, 'CHUNK', chunk)
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
    memory = Memory(jnp.asarray(GOLDEN['x']), golden_context(packed=packed))
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


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('chunk', [1, 4])
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


def test_gradients_of_the_packed_cross_form_equal_those_of_its_examples():
    rng = np.random.default_rng(1)
    x, memory = (jnp.asarray(rng.normal(size=(1, n, 4)), jnp.float32) for n in (6, 7))
    layer = linear_attention.LinearCrossAttention(2, 3)

    def loss(params, x, memory, ids, memory_ids, packed):
        memory = Memory(memory, SequenceContext(memory_ids, memory_ids, packed=packed))
        ctx = SequenceContext(ids, ids, packed=packed, memory=memory)  # Positions are not read.
        return jnp.sum(jnp.sin(layer.apply({'params': params}, x, ctx)) * (ctx.segment_ids > 0)[..., None])

    ids, memory_ids = np.array([[1, 1, 2, 2, 2, 0]]), np.array([[1, 1, 1, 1, 2, 2, 0]])
    ctx = context_of_ids(ids, memory=Memory(memory, context_of_ids(memory_ids)))
    params = nn.unbox(layer.init(jax.random.key(0), x, ctx)['params'])
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=5)
    packed = gradient(params, x, memory, ids, memory_ids, True)
    separate = [gradient(params, x, memory, (ids == index) * 1, (memory_ids == index) * 1, False) for index in (1, 2)]
    expected = jax.tree.map(jnp.add, *separate)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), packed, expected)


@pytest.mark.parametrize('flags', [{}, {'causal': True}, {'packed': True}], ids=str)
def test_memory_is_linear_in_length(flags):
    layer = linear_attention.LinearAttention(2, 16)

    def temporary_bytes(length):
        x = jnp.ones((1, length, 32))
        ctx = context_of_ids(np.ones((1, length)), **flags)
        params = nn.unbox(layer.init(jax.random.key(0), x, ctx)['params'])

        def loss(params, x, ctx):
            return jnp.sum(layer.apply({'params': params}, x, ctx))

        return jax.jit(jax.grad(loss)).lower(params, x, ctx).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < 2.2 * temporary_bytes(2048)


def test_decoding_state_does_not_depend_on_length():
    layer = linear_attention.LinearAttention(HEADS, HEAD_DIM)

    def shapes(length):
        ctx = context_of_ids(np.ones((2, length)), causal=True, decode=True)
        variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, length, 4)), ctx)
        return jax.tree.map(lambda array: array.shape, variables['cache'])

    expected = {'cached_sums': ((2, HEADS, HEAD_DIM, HEAD_DIM), (2, HEADS, HEAD_DIM))}
    assert shapes(5) == shapes(50) == expected


def test_features_are_positive_and_have_a_gradient():
    x = jnp.array([-80.0, -20.0, 0.0, 30.0])
    assert np.all(np.asarray(linear_attention.feature_map(x)) > 0)
    gradients = jax.vmap(jax.grad(linear_attention.feature_map))(x)
    assert np.all(np.isfinite(gradients)) and np.all(np.asarray(gradients) > 0)
