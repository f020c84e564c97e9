"""GELU in its tanh form with one exponential, and its derivative: `0.5 x (1 + tanh(u)) = x sigmoid(2 u)`."""

import math

import jax

# `2 u = x (SLOPE + CUBE x^2)`.
_SLOPE = 2 * (2 / math.pi) ** 0.5
_CUBE = 0.044715 * _SLOPE


def gelu(x: jax.Array) -> jax.Array:
    """The function."""
    return x * jax.nn.sigmoid(x * (_SLOPE + _CUBE * (x * x)))


def gelu_and_slope(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The function and its derivative."""
    square = x * x
    share = jax.nn.sigmoid(x * (_SLOPE + _CUBE * square))
    return x * share, share + x * share * (1 - share) * (_SLOPE + 3 * _CUBE * square)
