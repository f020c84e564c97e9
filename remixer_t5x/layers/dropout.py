"""Dropout with one mask for all tokens of a row, as T5 trains with on TPU.

Sharing the mask along the length makes drawing it length times cheaper, and T5's published recipes assume it.
"""

from __future__ import annotations

import jax
from flax import linen as nn


def dropout(rate: float, x: jax.Array, *, deterministic: bool) -> jax.Array:
    """Zeroes features of `x` [batch, length, features] with probability `rate`; call within `nn.compact`."""
    if rate == 0.0 or deterministic:
        return x
    return nn.Dropout(rate, broadcast_dims=(-2,))(x, deterministic=False)
