"""GELU on a GPU, alone, normalised and as a gate, equals its definition with autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.layers import gelu
from remixer_t5x.layers.compile_target import compiling_for

INPUTS = np.concatenate([np.linspace(-30, 30, 61), [-300.0, -1e-3, 0.0, 1e-3, 300.0]]).astype(np.float32)


def test_equals_the_definition_also_far_from_zero():
    with compiling_for('gpu'):
        actual = jax.vmap(jax.value_and_grad(gelu.gelu))(jnp.asarray(INPUTS))
    x = INPUTS.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    value = 0.5 * x * (1 + np.tanh(inner))
    gradient = 0.5 * (1 + np.tanh(inner)) + 0.5 * x * (1 - np.tanh(inner) ** 2) * slope
    np.testing.assert_allclose(actual[0], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual[1], gradient, rtol=1e-5, atol=1e-6)


def test_standardized_gelu_equals_autodiff():
    x, weights = np.random.default_rng(0).normal(size=(2, 3, 5, 16)).astype(np.float32)

    def plain(x):
        units = jax.nn.gelu(x)
        centred = units - units.mean(-1, keepdims=True)
        return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)

    def value_and_gradient(mix):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(weights * mix(x))))(x)

    actual = value_and_gradient(lambda x: gelu.standardized_gelu(x, 1e-6))
    wanted = value_and_gradient(plain)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-4), actual, wanted)


@pytest.mark.parametrize('rows', [1, 3])
@pytest.mark.parametrize('added', [False, True])
def test_gelu_times_equals_autodiff(rows, added):
    batch, length, features = 3, 5, 8
    rng = np.random.default_rng(1)
    full = (batch, length, features)
    x, mixed, more, weights = rng.normal(size=(4, *full)).astype(np.float32)
    scale, shift = rng.normal(size=(2, features)).astype(np.float32)
    totals = rng.normal(size=(batch, length, 1)).astype(np.float32)
    bias = rng.normal(size=(rows, length, 1)).astype(np.float32)
    factor = gelu.Affine(mixed, scale, totals, shift, bias, more if added else None)

    def plain(x, factor):
        f = factor.mixed * factor.scale + factor.totals * factor.shift + factor.bias
        return jax.nn.gelu(x) * (f + factor.added if added else f)

    def value_and_gradients(product):
        return jax.jit(jax.value_and_grad(lambda *both: jnp.sum(weights * product(*both)), argnums=(0, 1)))(x, factor)

    actual, wanted = value_and_gradients(gelu.gelu_times), value_and_gradients(plain)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-5), actual, wanted)
