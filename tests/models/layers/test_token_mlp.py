"""Mixing through hidden units, packed and unpacked, against the plain sum over the tokens of an example."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models.layers import token_mlp

HEADS, HIDDEN, FEATURES, N, M = 2, 3, 4, 9, 7
# The first is shorter than most examples.
BLOCKS = [2, 64]
few_examples = settings(max_examples=10, deadline=None, derandomize=True, database=None)


def make_arrays(seed, batch):
    rng = np.random.default_rng(seed)
    shapes = ((batch, N, HEADS, HIDDEN), (batch, N, HEADS, FEATURES), (batch, M, HEADS, HIDDEN), (HEADS, HIDDEN))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def plain(ids_in, ids_out, w_in, value, w_out, bias):
    """Computes the hidden units of every token, [batch, m, heads, hidden, features]."""
    same = ((ids_out[:, :, None] == ids_in[:, None]) & (ids_in > 0)[:, None]).astype(jnp.float32)
    hidden = jnp.einsum('bmn,bnhk,bnhf->bmhkf', same, w_in, value) + bias[:, :, None]
    return jnp.einsum('bmhk,bmhkf->bmhf', w_out, jax.nn.gelu(hidden))


def value_and_gradients(mix, ids_out, weights):
    def loss(*weights):
        return jnp.sum(jnp.sin(mix(*weights)) * (ids_out > 0)[..., None, None])

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(*weights)


@functools.partial(jax.jit, static_argnums=0)
def ours_packed(block, ids_in, ids_out, *weights):
    def mix(w_in, value, w_out, bias):
        return token_mlp.apply_token_mlp(w_in, value, w_out, ids_in, ids_out, packed=True, hidden_bias=bias)

    # BLOCK is read while tracing, once for each value of `block`.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_mlp, 'BLOCK_LENGTH', block)
        return value_and_gradients(mix, ids_out, weights)


@jax.jit
def plain_packed(ids_in, ids_out, *weights):
    return value_and_gradients(lambda *weights: plain(ids_in, ids_out, *weights), ids_out, weights)


def row_ids(length):
    """Returns a strategy for the ids of a row: examples 1 to 4 of any length, then padding."""
    counts = st.lists(st.integers(0, length), min_size=4, max_size=4)
    row = counts.map(lambda counts: np.repeat([1, 2, 3, 4], counts)[:length])
    return row.map(lambda ids: np.pad(ids, (0, length - len(ids))))


@pytest.mark.parametrize('block', BLOCKS)
@few_examples
@given(st.tuples(row_ids(N), row_ids(N)), st.tuples(row_ids(M), row_ids(M)), st.integers(0, 99))
def test_packed_equals_plain_with_gradients(block, ids_in, ids_out, seed):
    """Includes examples with tokens on one side only."""
    ids = [jnp.asarray(np.stack(rows), jnp.int32) for rows in (ids_in, ids_out)]
    weights = make_arrays(seed, 2)
    actual, expected = ours_packed(block, *ids, *weights), plain_packed(*ids, *weights)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-4), actual, expected)


def test_values_and_gradients_do_not_depend_on_padding():
    ids_in, ids_out = jnp.asarray([[1] * 2 + [2] * 5 + [0] * 2]), jnp.asarray([[1] * 2 + [2] * 4 + [0]])
    w_in, value, w_out, bias = make_arrays(0, 1)
    expected, expected_gradients = plain_packed(ids_in, ids_out, w_in, value, w_out, bias)
    w_in, value = (array.at[:, 7:].set(jnp.nan) for array in (w_in, value))
    actual, gradients = ours_packed(2, ids_in, ids_out, w_in, value, w_out.at[:, 6:].set(1e30), bias)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-5), gradients, expected_gradients)


def test_the_content_of_padding_does_not_change_the_unpacked_output():
    ids_in, ids_out = jnp.asarray([[1] * 6 + [0] * 3]), jnp.ones((1, M), jnp.int32)
    w_in, value, w_out, bias = make_arrays(0, 1)
    expected = plain(ids_in, ids_out, w_in, value, w_out, bias)
    w_in, value = w_in.at[:, 6:].set(9.0), value.at[:, 6:].set(jnp.nan)
    mixed = token_mlp.apply_token_mlp(w_in, value, w_out, ids_in, ids_out, packed=False, hidden_bias=bias)
    np.testing.assert_allclose(mixed, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('heads', [1, HEADS])
def test_mixing_on_an_accelerator_equals_mixing_on_a_cpu(heads):
    ids_in, ids_out = jnp.asarray([[1] * 6 + [0] * 3]), jnp.ones((1, M), jnp.int32)
    *weights, bias = make_arrays(0, 1)
    weights = [*(array[:, :, :heads] for array in weights), bias[:heads]]

    def mix(w_in, value, w_out, bias):
        return token_mlp.apply_token_mlp(w_in, value, w_out, ids_in, ids_out, packed=False, hidden_bias=bias)

    expected = jax.jit(lambda weights: value_and_gradients(mix, ids_out, weights))(weights)
    with compile_for_platform('accelerator'):
        actual = jax.jit(lambda weights: value_and_gradients(mix, ids_out, weights))(weights)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-5), actual, expected)


def test_low_precision_is_summed_in_float32():
    """A thousand ones added up in bfloat16 would stop at 256."""
    ones = jnp.ones((1, 1000, 1, 1), jnp.bfloat16)
    ids = jnp.ones((1, 1000), jnp.int32)
    for packed in (False, True):
        mixed = token_mlp.apply_token_mlp(ones, ones, ones[:, :1], ids, ids[:, :1], packed=packed)
        assert mixed.dtype == jnp.bfloat16 and float(mixed[0, 0, 0, 0]) == 1000


def test_packed_rows_store_the_hidden_units_of_one_example_at_a_time():
    batch, length, heads, hidden, features = 2, 512, 1, 64, 64
    ids = jnp.ones((batch, length), jnp.int32)

    def loss(w_in, value, w_out):
        return jnp.sum(token_mlp.apply_token_mlp(w_in, value, w_out, ids, ids, packed=True))

    shapes = [jax.ShapeDtypeStruct((batch, length, heads, width), jnp.float32) for width in (hidden, features, hidden)]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
    tokens, units = batch * length * heads * (hidden + features) * 4, batch * heads * hidden * features * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * tokens + 6 * units
