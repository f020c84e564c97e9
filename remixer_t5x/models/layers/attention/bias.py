"""A position bias as one value for each head and distance, for kernels that spread it over the logits themselves."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from flax import struct

from remixer_t5x.models.layers.diagonals import spread_over_diagonals


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


# What sublayers pass on: a bias for each query and key, one for each distance, or none.
Bias: TypeAlias = 'jax.Array | DistanceBias | None'


def full_bias(bias: Bias) -> jax.Array | None:
    """[1, heads, q, k] float32, or None."""
    return bias.spread() if isinstance(bias, DistanceBias) else bias


def split_bias(bias: Bias, parts: int) -> list[Bias]:
    """The bias of each of `parts` equal parts of the heads."""
    if isinstance(bias, DistanceBias):
        return [DistanceBias(part) for part in jnp.split(bias.by_distance, parts)]
    return [None] * parts if bias is None else [*jnp.split(bias, parts, axis=1)]
