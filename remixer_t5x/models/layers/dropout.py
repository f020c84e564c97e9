"""Dropout with one mask for all tokens of a row, as in T5's published recipes.

Compared with a mask for each token, this divides the number of random values by the row length.
"""

import jax
from flax import linen as nn


def dropout(rate: float, x: jax.Array, *, deterministic: bool) -> jax.Array:
    """Zeroes features of `x` [batch, length, features] with probability `rate` and scales up the others.

    All tokens of a row share one mask. Must be called within an `nn.compact` method.
    """
    if rate == 0.0 or deterministic:
        return x
    return nn.Dropout(rate, broadcast_dims=(-2,))(x, deterministic=False)


def drop_value_rows(rate: float, value: jax.Array, *, deterministic: bool) -> jax.Array:
    """Applies attention dropout with one mask for all queries, as in T5, by zeroing whole value vectors.

    `value` is [..., kv]. Must be called within an `nn.compact` method.
    """
    if rate == 0.0 or deterministic:
        return value
    return nn.Dropout(rate, broadcast_dims=(-1,))(value, deterministic=False)
