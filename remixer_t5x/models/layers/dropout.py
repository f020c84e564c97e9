"""Dropout with one mask for several tokens, as in T5's published recipes."""

import jax
from flax import linen as nn


def dropout(rate: float, x: jax.Array, shared_axis: int = -2, *, deterministic: bool) -> jax.Array:
    """Zeroes elements of `x` with probability `rate` and scales up the others; call within an `nn.compact` method.

    All elements along `shared_axis` share one mask. For features [batch, length, features], the default axis drops the
    same features of all tokens of a row, which needs fewer random values than a mask for each token. For attention
    values [..., kv], -1 drops whole vectors, which is dropout on attention weights with one mask for all queries.
    """
    if rate == 0.0 or deterministic:
        return x
    return nn.Dropout(rate, broadcast_dims=(shared_axis,))(x, deterministic=False)
