"""The running token MLP against the plain causal sum, with gradients; it does not store the sum of every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.kernels import running_token_mlp, running_token_mlp_tpu, running_token_mlp_unrolled
from remixer_t5x.kernels.compile_target import compile_for_platform

HEADS, HIDDEN, FEATURES, LENGTH = 2, 4, 3, 13
few_examples = settings(max_examples=10, deadline=None, derandomize=True, database=None)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(running_token_mlp_tpu, '_MAX_BLOCK_LENGTH', 8)
    monkeypatch.setattr(running_token_mlp_unrolled, '_MAX_BLOCK_LENGTH', 8)
    monkeypatch.setattr(running_token_mlp_unrolled, '_SEGMENT_LENGTH', 3)


def plain(w_in, value, w_out, ids, scale):
    """Computes the MLP with the hidden units of all tokens, [batch, length, heads, hidden, features]."""
    mask = (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None] & np.tri(ids.shape[1], dtype=bool)
    hidden = jnp.einsum('btj,bjhk,bjhf->bthkf', mask.astype(jnp.float32), w_in, value)
    return jnp.einsum('bthk,bthkf->bthf', w_out, jax.nn.gelu(hidden * scale[..., None, None, None]))


def value_and_gradients(mix, ids, weights):
    def loss(*weights):
        return jnp.sum(jnp.sin(mix(*weights)) * (ids > 0)[..., None, None])

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(*weights)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def actual(platform, packed, blocks, ids, scale, *weights):
    mix = functools.partial(running_token_mlp.apply_running_token_mlp, ids=ids, packed=packed, hidden_scale=scale)
    with compile_for_platform(platform, interpret=True):
        return value_and_gradients(mix, ids, weights)


@jax.jit
def expected(ids, scale, *weights):
    return value_and_gradients(lambda *weights: plain(*weights, ids, scale), ids, weights)


def packed_row(counts):
    ids = np.repeat(np.arange(1, len(counts) + 1), counts)[:LENGTH]
    return np.pad(ids, (0, LENGTH - len(ids)))


@pytest.mark.parametrize('platform', ['cpu', 'gpu', 'tpu'])
@pytest.mark.parametrize(('packed', 'blocks'), [(True, 'small_blocks'), (False, 'small_blocks'), (True, None)])
def test_equals_the_plain_sum_with_gradients(platform, packed, blocks, request):
    if blocks:
        request.getfixturevalue(blocks)
    row = st.lists(st.integers(1, LENGTH), min_size=1, max_size=6 if packed else 1)

    @few_examples
    @given(st.tuples(row, row), st.integers(0, 99))
    def check(rows, seed):
        ids = jnp.asarray(np.stack([packed_row(counts) for counts in rows]), jnp.int32)
        rng = np.random.default_rng(seed)
        weights = [
            jnp.asarray(rng.normal(size=(2, LENGTH, HEADS, width)), jnp.float32) for width in (HIDDEN, FEATURES, HIDDEN)
        ]
        scale = jnp.asarray(rng.uniform(0.5, 1.5, (2, LENGTH)), jnp.float32)
        jax.tree.map(
            lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4),
            actual(platform, packed, blocks, ids, scale, *weights),
            expected(ids, scale, *weights),
        )

    check()


@pytest.mark.parametrize('platform', ['cpu', 'gpu'])
def test_gradients_stay_exact_for_large_sums(platform):
    """Rounding errors of subtracted tokens do not accumulate; the TPU kernel subtracts none."""
    length, hidden = 1500, 8
    rng = np.random.default_rng(0)
    w_in, value, w_out = (
        jnp.asarray(rng.uniform(0, 1, size=(1, length, 1, width)), jnp.float32) for width in (hidden, 2, hidden)
    )
    ids = jnp.ones((1, length), jnp.int32)
    scale = 1.0 / (jnp.arange(length)[None] + 1.0)
    mix = functools.partial(running_token_mlp.apply_running_token_mlp, ids=ids, packed=False, hidden_scale=scale)
    with compile_for_platform(platform, interpret=True):
        actual = jax.jit(functools.partial(value_and_gradients, mix))(ids, (w_in, value, w_out))
    with jax.enable_x64(True):
        exact = [jnp.asarray(array, jnp.float64) for array in (w_in, value, w_out)]
        precise = value_and_gradients(lambda *weights: plain(*weights, ids, scale), ids, exact)
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(precise), strict=True):
        np.testing.assert_allclose(a, w, atol=2e-5 * np.max(np.abs(w)), rtol=0)


def test_padding_does_not_change_the_result():
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(1, LENGTH, HEADS, width)), jnp.float32) for width in (HIDDEN, FEATURES)]
    w_out = jnp.asarray(rng.normal(size=(1, LENGTH, HEADS, HIDDEN)), jnp.float32)
    ids = jnp.asarray([[1] * 6 + [0] * (LENGTH - 6)])
    padded_with_nan = [array.at[:, 6:].set(jnp.nan) for array in weights]
    expected = running_token_mlp.apply_running_token_mlp(*weights, w_out, ids, packed=False)
    mixed = running_token_mlp.apply_running_token_mlp(*padded_with_nan, w_out, ids, packed=False)
    np.testing.assert_array_equal(mixed[:, :6], expected[:, :6])
    assert np.all(np.isfinite(mixed))


@pytest.mark.parametrize(('platform', 'rows', 'packed'), [('cpu', 3, True), ('gpu', 4, False)])
def test_memory_is_length_times_width(platform, rows, packed):
    """The memory of a token is the difference between two lengths; it is a few rows of features, not a sum."""
    batch, heads, hidden, features = 2, 2, 64, 32

    def temporary_bytes(length):
        ids = jnp.ones((batch, length), jnp.int32)

        def loss(*weights):
            return jnp.sum(running_token_mlp.apply_running_token_mlp(*weights, ids, packed=packed))

        shapes = [
            jax.ShapeDtypeStruct((batch, length, heads, width), jnp.float32) for width in (hidden, features, hidden)
        ]
        with compile_for_platform(platform, interpret=True):
            compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    per_token = (temporary_bytes(4096) - temporary_bytes(2048)) / (2048 * batch * 4)
    width, sum_size = heads * (hidden + features), heads * hidden * features
    assert per_token < rows * width < sum_size / 5
