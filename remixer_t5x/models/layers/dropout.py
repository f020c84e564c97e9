"""Dropout with one mask for all tokens of a row, as in T5's training on TPUs.

A shared mask needs fewer random numbers by a factor of the length, and T5's published recipes use it.
"""

import jax
from flax import linen as nn


def dropout(rate: float, x: jax.Array, *, deterministic: bool) -> jax.Array:
    """Zeroes features of `x` [batch, length, features] with probability `rate`; call within `nn.compact`."""
    if rate == 0.0 or deterministic:
        return x
    return nn.Dropout(rate, broadcast_dims=(-2,))(x, deterministic=False)


def drop_value_rows(rate: float, value: jax.Array, *, deterministic: bool) -> jax.Array:
    """Dropout on attention weights with one mask for all queries, as in T5: zeroes whole rows of a head's values.

    `value` is [..., heads, ..., kv]; call within `nn.compact`.
    """
    if rate == 0.0 or deterministic:
        return value
    return nn.Dropout(rate, broadcast_dims=(-1,))(value, deterministic=False)
