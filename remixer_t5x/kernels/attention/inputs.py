"""The inputs of attention besides queries, keys and values: the position bias, and which keys a query sees.

A kernel spreads a bias by distance over the logits itself, and derives the mask from the segments.
"""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from remixer_t5x.kernels.diagonals import spread_over_diagonals


@struct.dataclass
class DistanceBias:
    """`bias[0, head, q, k] = by_distance[head, k - q + length - 1]`.

    Attributes:
        by_distance: [heads, 2 * length - 1] float32, for `key - query` from -(length - 1) to length - 1.
    """

    by_distance: jax.Array

    def spread(self) -> jax.Array:
        """[1, heads, length, length] float32."""
        return spread_over_diagonals(self.by_distance, (self.by_distance.shape[1] + 1) // 2)[None]


# A bias for each query and key, one for each distance, or none.
Bias: TypeAlias = 'jax.Array | DistanceBias | None'


def full_bias(bias: Bias) -> jax.Array | None:
    """[1, heads, q, k] float32, or None."""
    return bias.spread() if isinstance(bias, DistanceBias) else bias


def split_bias(bias: Bias, parts: int) -> list[Bias]:
    """The bias of each of `parts` equal parts of the heads."""
    if isinstance(bias, DistanceBias):
        return [DistanceBias(part) for part in jnp.split(bias.by_distance, parts)]
    return [None] * parts if bias is None else [*jnp.split(bias, parts, axis=1)]


@struct.dataclass
class Visibility:
    """The keys that each query of a row can see, without a [query, key] array.

    Attributes:
        query_segments: [batch, queries] int32, the example that a query belongs to; None if each row is one example,
            whose tokens are visible to every query.
        key_segments: [batch, keys] int32, the example that a key belongs to; 0 is padding.
        causal: a query sees no key after its own position in the row.
        key_prefix: [batch, keys] bool, keys that every query of their example sees; None if there are none.
    """

    query_segments: jax.Array | None
    key_segments: jax.Array
    causal: bool = struct.field(pytree_node=False, default=False)
    key_prefix: jax.Array | None = None

    def mask(self) -> jax.Array:
        """The mask, bool, broadcastable to [batch, 1, queries, keys]; True if a query sees a key."""
        if self.query_segments is None:
            allowed = (self.key_segments > 0)[:, None, None, :]
        else:
            allowed = self.query_segments[:, None, :, None] == self.key_segments[:, None, None, :]
        if not self.causal:
            return allowed
        before = jnp.tri(self.key_segments.shape[1], dtype=bool)
        return allowed & (before if self.key_prefix is None else before | self.key_prefix[:, None, None, :])
