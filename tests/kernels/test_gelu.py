"""GELU on a GPU, alone and normalized, against its definition, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.kernels import gelu
from remixer_t5x.kernels.compile_target import compile_for_platform

INPUTS = np.concatenate([np.linspace(-30, 30, 61), [-300.0, -1e-3, 0.0, 1e-3, 300.0]]).astype(np.float32)


def test_gelu_equals_its_definition_for_small_and_large_inputs():
    with compile_for_platform('gpu'):
        actual = jax.vmap(jax.value_and_grad(gelu.gelu))(jnp.asarray(INPUTS))
    x = INPUTS.astype(np.float64)
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    value = 0.5 * x * (1 + np.tanh(inner))
    gradient = 0.5 * (1 + np.tanh(inner)) + 0.5 * x * (1 - np.tanh(inner) ** 2) * slope
    np.testing.assert_allclose(actual[0], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual[1], gradient, rtol=1e-5, atol=1e-6)


def normalized_gelu(x, scale):
    units = jax.nn.gelu(x)
    centred = units - units.mean(-1, keepdims=True)
    return scale * centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def test_normalized_gelu_equals_autodiff():
    x, weights = np.random.default_rng(0).normal(size=(2, 3, 5, 16)).astype(np.float32)
    # Some scales are zero.
    scale = np.linspace(-1, 2, 16, dtype=np.float32).round(1)

    def value_and_gradients(mix):
        return jax.jit(jax.value_and_grad(lambda *both: jnp.sum(weights * mix(*both)), argnums=(0, 1)))(x, scale)

    with compile_for_platform('gpu'):
        actual = value_and_gradients(lambda x, scale: gelu.normalized_gelu(x, scale, 1e-6))
    expected = value_and_gradients(normalized_gelu)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-4), actual, expected)


def test_normalized_gelu_of_constant_rows_is_zero():
    x = jnp.full((2, 64), 300.0)
    np.testing.assert_array_equal(gelu.normalized_gelu(x, jnp.ones(64), 1e-6), np.zeros((2, 64)))
