"""Takes rows of an embedding from a model with another vocabulary: each row from the row of the same piece.

What has one row (or column) for each id is known by its logical axis `vocab`: the embedding and the output projection.
Rows of pieces that the other vocabulary lacks keep their fresh values.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from remixer_t5x import axes
from remixer_t5x.data import task_vocabulary


def matches(vocabulary: Any, other: Any) -> np.ndarray:
    """[ids of `vocabulary`] int32: the id of the same piece in `other`, -1 where it has none."""
    ids = {piece: index for index, piece in enumerate(task_vocabulary.pieces(other)) if piece}
    return np.asarray([ids.get(piece, -1) for piece in task_vocabulary.pieces(vocabulary)], np.int32)


def axis_of(names: tuple[str | None, ...]) -> int | None:
    """Which axis of a parameter with these logical axes has the ids, if any."""
    return names.index(axes.VOCAB) if axes.VOCAB in names else None


def to_read(wanted: jax.ShapeDtypeStruct, shape: tuple[int, ...], axis: int) -> jax.ShapeDtypeStruct:
    """How to read the other model's array: its ids are not split over devices, because they may not divide."""
    spec = [*wanted.sharding.spec, *[None] * (len(shape) - len(wanted.sharding.spec))]
    spec[axis] = None
    return jax.ShapeDtypeStruct(shape, wanted.dtype, sharding=NamedSharding(wanted.sharding.mesh, PartitionSpec(*spec)))


def rows_by_piece(fresh: jax.Array, other: jax.Array, found: np.ndarray, axis: int) -> jax.Array:
    """`fresh` with the rows of `other` at `found`, along `axis`; rows behind the end of `found` stay fresh."""
    index = np.full(fresh.shape[axis], -1, np.int32)
    index[: len(found)] = np.where(found < other.shape[axis], found, -1)[: len(index)]
    is_known = (index >= 0).reshape([-1 if place == axis else 1 for place in range(fresh.ndim)])

    def choose(fresh, other):
        return jnp.where(is_known, jnp.take(other, np.maximum(index, 0), axis=axis), fresh)

    return jax.jit(choose, out_shardings=fresh.sharding)(fresh, other)
