"""GELU in its tanh form (Hendrycks and Gimpel 2016), and what gMLP computes around it, in few kernels of a GPU.

    gelu(x) = x / 2 (1 + tanh(u)) = x sigmoid(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)

A GPU waits for memory here. So each kernel computes what it needs from the inputs, in float32 and with one exponential,
and only operands of matmuls are written to memory.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from remixer_t5x.kernels.attention.formula import ATTENTION_OUTPUT
from remixer_t5x.kernels.compile_target import target_platform

# 2 u = x (_SLOPE + _CUBE x^2)
_SLOPE = 2 * (2 / math.pi) ** 0.5
_CUBE = 0.044715 * _SLOPE


def sigmoid_form(x: jax.Array) -> jax.Array:
    """GELU with one exponential."""
    return x * jax.nn.sigmoid(x * (_SLOPE + _CUBE * (x * x)))


def sigmoid_form_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """GELU and its derivative, with one exponential for both."""
    share = jax.nn.sigmoid(x * (_SLOPE + _CUBE * (x * x)))
    return x * share, share + x * share * (1 - share) * (_SLOPE + 3 * _CUBE * (x * x))


def gelu(x: jax.Array) -> jax.Array:
    """GELU in x's dtype."""
    if target_platform() != 'gpu':
        return nn.gelu(x, approximate=True)
    return sigmoid_form(x.astype(jnp.float32)).astype(x.dtype)


@jax.custom_vjp
def scaled_units(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """`scale * (g - mean(g)) / sqrt(var(g) + epsilon)` of `g = gelu(x)` over the last axis, in x's dtype.

    The backward pass keeps x, the scale, and the two statistics of each row.
    """
    return _scaled_units_and_kept(x, scale, epsilon)[0]


def _scaled_units_and_kept(x, scale, epsilon):
    units = sigmoid_form(x.astype(jnp.float32))
    mean = _mean(units)
    # Both from one reading of x.
    variance = jnp.maximum(_mean(jnp.square(units)) - jnp.square(mean), 0.0)
    inverse = jax.lax.rsqrt(variance + epsilon)
    mean, inverse = (
        checkpoint_name(array, ATTENTION_OUTPUT) for array in jax.lax.optimization_barrier((mean, inverse))
    )
    units = sigmoid_form(recomputed(x.astype(jnp.float32), 1))
    return (scale * ((units - mean) * inverse)).astype(x.dtype), (x, scale, mean, inverse)


def _scaled_units_backward(residuals, gradient):
    x, scale, mean, inverse = residuals
    gradient = gradient.astype(jnp.float32)

    def normalised(form):
        units, slope = sigmoid_form_and_slope(recomputed(x.astype(jnp.float32), form))
        return (units - mean) * inverse, slope

    of_scale = jnp.sum(gradient * normalised(2)[0], tuple(range(x.ndim - 1)))
    result, _ = normalised(3)
    scaled = gradient * scale
    first, second = jax.lax.optimization_barrier((_mean(scaled), _mean(scaled * result)))
    result, slope = normalised(4)
    return (inverse * (scaled - first - result * second) * slope).astype(x.dtype), of_scale, None


scaled_units.defvjp(_scaled_units_and_kept, _scaled_units_backward)


def gelu_times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`gelu(x) * factor` in x's dtype; the factor may have more digits."""
    if target_platform() != 'gpu':
        return gelu(x) * factor
    return _gelu_times(x, factor)


@jax.custom_vjp
def _gelu_times(x: jax.Array, factor: jax.Array) -> jax.Array:
    return (sigmoid_form(x.astype(jnp.float32)) * factor.astype(jnp.float32)).astype(x.dtype)


def _gelu_times_backward(residuals, gradient):
    x, factor = residuals
    gradient = gradient.astype(jnp.float32)
    units, slope = sigmoid_form_and_slope(recomputed(x.astype(jnp.float32), 1))
    of_x = gradient * factor.astype(jnp.float32) * slope
    return of_x.astype(x.dtype), (gradient * units).astype(factor.dtype)


_gelu_times.defvjp(lambda *operands: (_gelu_times(*operands), operands), _gelu_times_backward)


def _mean(array: jax.Array) -> jax.Array:
    return jnp.mean(array, axis=-1, keepdims=True)


def recomputed(x: jax.Array, form: int) -> jax.Array:
    """x, in one of many forms, of which XLA does not see that they are equal.

    XLA would write to memory what several kernels compute from x; each of them computes it again in less time.
    """
    power = 2.0**form
    return x * (jax.lax.optimization_barrier(jnp.float32(power)) / power)
