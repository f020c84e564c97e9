"""GELU in its tanh form (Hendrycks and Gimpel 2016), and what gMLP computes around it, in few kernels of a GPU.

    gelu(x) = x / 2 (1 + tanh(u)) = x sigmoid(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)

A GPU waits for memory here. So each kernel computes what it needs from the inputs, in float32 and with one exponential,
and only operands of matmuls are written to memory.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.layers.compile_target import target_platform

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
def standardized_gelu(x: jax.Array, epsilon: float) -> jax.Array:
    """`(g - mean(g)) / sqrt(var(g) + epsilon)` of `g = gelu(x)` over the last axis, in x's dtype.

    The backward pass keeps x alone. XLA:GPU makes one kernel of each pass.
    """
    return _standardized(sigmoid_form(x.astype(jnp.float32)), epsilon)[0].astype(x.dtype)


def _standardized_gelu_backward(kept, gradient):
    x, epsilon = kept
    units, slope = sigmoid_form_and_slope(_again(x.astype(jnp.float32)))
    result, inverse = _standardized(units, epsilon)
    gradient = gradient.astype(jnp.float32)
    gradient = gradient - _mean(gradient) - result * _mean(gradient * result)
    return (inverse * gradient * slope).astype(x.dtype), None


standardized_gelu.defvjp(lambda x, epsilon: (standardized_gelu(x, epsilon), (x, epsilon)), _standardized_gelu_backward)


class Affine(NamedTuple):
    """`mixed * scale + totals * shift + bias + added`, [batch, length, features] in mixed's dtype.

    Attributes:
        mixed: [batch, length, features].
        scale, shift: float32 [features].
        totals: float32 [batch, length, 1].
        bias: float32 [batch or 1, length, 1].
        added: [batch, length, features] or None.
    """

    mixed: jax.Array
    scale: jax.Array
    totals: jax.Array
    shift: jax.Array
    bias: jax.Array
    added: jax.Array | None

    def value(self) -> jax.Array:
        """The sum in mixed's dtype."""
        return self.float32().astype(self.mixed.dtype)

    def float32(self) -> jax.Array:
        """The sum before it is rounded."""
        total = self.mixed.astype(jnp.float32) * self.scale + self.totals * self.shift + self.bias
        return total if self.added is None else total + self.added.astype(jnp.float32)


@jax.custom_vjp
def gelu_times(x: jax.Array, factor: Affine) -> jax.Array:
    """`gelu(x) * factor`, [batch, length, features] in x's dtype."""
    return (sigmoid_form(x.astype(jnp.float32)) * factor.float32()).astype(x.dtype)


def _gelu_times_backward(kept, gradient):
    x, factor = kept
    gradient, x32 = gradient.astype(jnp.float32), x.astype(jnp.float32)
    units, slope = sigmoid_form_and_slope(_again(x32))
    of_factor = gradient * units
    # The sums over tokens are a kernel of their own, for which XLA would write `of_factor` to memory in float32.
    for_sums = gradient * sigmoid_form(_again(x32, factor.scale))
    return (gradient * factor.float32() * slope).astype(x.dtype), Affine(
        mixed=(of_factor * factor.scale).astype(factor.mixed.dtype),
        scale=jnp.sum(for_sums * factor.mixed.astype(jnp.float32), (0, 1)),
        totals=jnp.sum(of_factor * factor.shift, axis=-1, keepdims=True),
        shift=jnp.sum(for_sums * factor.totals, (0, 1)),
        bias=_sum_to(factor.bias.shape, jnp.sum(of_factor, axis=-1, keepdims=True)),
        added=None if factor.added is None else of_factor.astype(factor.added.dtype),
    )


gelu_times.defvjp(lambda x, factor: (gelu_times(x, factor), (x, factor)), _gelu_times_backward)


def _sum_to(shape: tuple[int, ...], array: jax.Array) -> jax.Array:
    return array if array.shape == shape else jnp.sum(array, axis=0, keepdims=True)


def _standardized(units: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """The result and what it was multiplied by, [..., 1]."""
    centred = units - _mean(units)
    inverse = jax.lax.rsqrt(_mean(jnp.square(centred)) + epsilon)
    return centred * inverse, inverse


def _mean(array: jax.Array) -> jax.Array:
    return jnp.mean(array, axis=-1, keepdims=True)


def _again(x: jax.Array, *apart: jax.Array) -> jax.Array:
    """x, in a form that XLA does not recognise, nor the form with other arrays `apart`.

    XLA would write to memory what several kernels compute from x; each of them computes it again in less time.
    """
    return x * jax.lax.optimization_barrier((jnp.float32(1), *apart))[0]
