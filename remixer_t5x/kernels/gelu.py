"""The tanh approximation of GELU (Hendrycks and Gimpel 2016), with fused variants for GPUs.

    gelu(x) = x / 2 (1 + tanh(u)) = x sigmoid(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)

On GPUs, memory bandwidth limits these operations, so each GPU kernel recomputes GELU from its inputs, with a single
exponential, and writes only the operands of matmuls to memory.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.attention_formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import get_target_platform

# 2 u = x (_GELU_LINEAR + _GELU_CUBIC x^2)
_GELU_LINEAR = 2 * (2 / math.pi) ** 0.5
_GELU_CUBIC = 0.044715 * _GELU_LINEAR


def sigmoid_gelu(x: jax.Array) -> jax.Array:
    """Computes the tanh approximation of GELU with a single exponential."""
    return x * jax.nn.sigmoid(x * (_GELU_LINEAR + _GELU_CUBIC * (x * x)))


def sigmoid_gelu_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the tanh approximation of GELU and its derivative with a single exponential."""
    gate = jax.nn.sigmoid(x * (_GELU_LINEAR + _GELU_CUBIC * (x * x)))
    return x * gate, gate + x * gate * (1 - gate) * (_GELU_LINEAR + 3 * _GELU_CUBIC * (x * x))


def gelu(x: jax.Array) -> jax.Array:
    """Computes the tanh approximation of GELU; the result has x's dtype."""
    if get_target_platform() != 'gpu':
        return nn.gelu(x, approximate=True)
    return sigmoid_gelu(x.astype(jnp.float32)).astype(x.dtype)


@jax.custom_vjp
def normalized_gelu(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Computes `scale * (g - mean(g)) / sqrt(var(g) + epsilon)` over the last axis, for g = gelu(x), in x's dtype.

    The backward pass reads x, the scale, and the mean and inverse standard deviation of each row.
    """
    return _normalized_gelu_forward(x, scale, epsilon)[0]


def _normalized_gelu_forward(x, scale, epsilon):
    units = sigmoid_gelu(x.astype(jnp.float32))
    mean = _mean_over_features(units)
    # Computing the variance as E[g^2] - E[g]^2 needs only one pass over x.
    variance = jnp.maximum(_mean_over_features(jnp.square(units)) - jnp.square(mean), 0.0)
    inverse = jax.lax.rsqrt(variance + epsilon)
    mean, inverse = (
        checkpoint_name(array, ATTENTION_OUTPUT) for array in jax.lax.optimization_barrier((mean, inverse))
    )
    units = sigmoid_gelu(prevent_cse(x.astype(jnp.float32), 1))
    return (scale * ((units - mean) * inverse)).astype(x.dtype), (x, scale, mean, inverse)


def _normalized_gelu_backward(residuals, gradient):
    x, scale, mean, inverse = residuals
    gradient = gradient.astype(jnp.float32)

    def recompute_normalized_units(variant):
        units, slope = sigmoid_gelu_and_slope(prevent_cse(x.astype(jnp.float32), variant))
        return (units - mean) * inverse, slope

    scale_gradient = jnp.sum(gradient * recompute_normalized_units(2)[0], tuple(range(x.ndim - 1)))
    result, _ = recompute_normalized_units(3)
    scaled = gradient * scale
    scaled_mean, product_mean = jax.lax.optimization_barrier(
        (_mean_over_features(scaled), _mean_over_features(scaled * result))
    )
    result, slope = recompute_normalized_units(4)
    x_gradient = inverse * (scaled - scaled_mean - result * product_mean) * slope
    return x_gradient.astype(x.dtype), scale_gradient, None


normalized_gelu.defvjp(_normalized_gelu_forward, _normalized_gelu_backward)


def multiply_by_gelu(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Computes `gelu(x) * factor` in x's dtype; `factor` may have a higher precision."""
    if get_target_platform() != 'gpu':
        return gelu(x) * factor
    return (sigmoid_gelu(x.astype(jnp.float32)) * factor.astype(jnp.float32)).astype(x.dtype)


def _mean_over_features(array: jax.Array) -> jax.Array:
    return jnp.mean(array, axis=-1, keepdims=True)


def prevent_cse(x: jax.Array, variant: int) -> jax.Array:
    """Returns x in a form that XLA's common subexpression elimination (CSE) keeps separate for each `variant`.

    Otherwise, XLA would compute values used by several kernels only once and write them to memory, which is slower.
    """
    power = 2.0**variant
    return x * (jax.lax.optimization_barrier(jnp.float32(power)) / power)
