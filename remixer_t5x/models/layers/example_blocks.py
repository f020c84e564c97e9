"""Cuts packed rows into blocks of tokens of one example, for computations that need a pass for each example.

The tokens of a row are sorted by example, the longest example first. Step k of a loop then takes the k-th longest
example of every row, in as many blocks as the longest of these needs. The k-th longest of a row of n tokens has at most
n / k, so a loop over E examples takes at most `n (1 + 1/2 + ... + 1/E) + E * BLOCK` tokens of a row, where a pass over
the row for each example takes `n E`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# A shorter block wastes less on short examples, and needs more steps for long ones.
BLOCK = 64


@dataclasses.dataclass(frozen=True)
class Side:
    """The tokens of a row that are read, or those that are written, sorted by the rank of their example.

    Attributes:
        order: [batch, n] int32, the position in the row of each sorted token.
        inverse: [batch, n] int32, the index of each token of the row among the sorted tokens.
        is_used: [batch, n] bool, whether a token of the row belongs to an example with a rank.
        first: [batch, ranks] int32, the index of the first sorted token of an example.
        count: [batch, ranks] int32, the number of tokens of an example.
    """

    order: jax.Array
    inverse: jax.Array
    is_used: jax.Array
    first: jax.Array
    count: jax.Array

    def sort(self, array: jax.Array) -> jax.Array:
        """[batch, n, ...] -> [batch, n + BLOCK, ...]; zeros follow the last token."""
        rest = ((0, 0),) * (array.ndim - 2)
        return jnp.pad(_take(array, self.order), ((0, 0), (0, BLOCK), *rest))

    def back(self, array: jax.Array) -> jax.Array:
        """Inverts `sort`; tokens that are not used get zeros."""
        return jnp.where(_expand(self.is_used, array), _take(array, self.inverse), 0)

    def nothing(self, like: jax.Array) -> jax.Array:
        """Sorted zeros with the features of `like`, [batch, n + BLOCK, ...]."""
        batch, length = self.order.shape
        return jnp.zeros((batch, length + BLOCK, *like.shape[2:]), like.dtype)

    def loop(self, rank: jax.Array, body: Callable[[Callable, Callable, jax.Array, Any], Any], start: Any) -> Any:
        """Runs `body(read, write, take, carry) -> carry` for each block of an example of `rank`, or once for the row.

        `read` cuts [batch, tokens, ...] out of a sorted array, `write` puts it back, and `take` [batch, tokens] is
        False at tokens of other examples. What is written there is written again by a later block, or is behind the
        last token of the row, so a loop over all ranks in order overwrites it.
        """
        first, count = self.first[:, rank], self.count[:, rank]
        length = self.order.shape[1]

        def block(index, carry):
            place = jnp.minimum(first + index * BLOCK, length)
            take = place[:, None] + jnp.arange(BLOCK) < (first + count)[:, None]

            def read(array):
                return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, BLOCK))(array, place)

            def write(array, values):
                put = jax.vmap(lambda row, values, at: jax.lax.dynamic_update_slice_in_dim(row, values, at, 0))
                return put(array, values.astype(array.dtype), place)

            return body(read, write, take, carry)

        def whole_row(carry):
            place = jnp.arange(length)
            take = (place >= first[:, None]) & (place < (first + count)[:, None])

            def write(array, values):
                updated = jnp.where(_expand(take, values), values.astype(array.dtype), array[:, :length])
                return array.at[:, :length].set(updated)

            return body(lambda array: array[:, :length], write, take, carry)

        longest = jnp.max(count)
        blocks = (longest + BLOCK - 1) // BLOCK
        # One matmul of the whole row is faster than a matmul for each block.
        return jax.lax.cond(
            2 * longest > length, whole_row, lambda carry: jax.lax.fori_loop(0, blocks, block, carry), start
        )


def sort_by_example(ids_in: jax.Array, ids_out: jax.Array) -> tuple[Side, Side, jax.Array]:
    """Sorts the tokens that are read and those that are written; also returns the number of ranks.

    Args:
        ids_in, ids_out: [batch, n] and [batch, m] int32; 1..k names the example of a token, 0 is padding. Tokens of an
            example need not be next to each other.
    """
    names = ids_in.shape[1] + ids_out.shape[1] + 1
    counts = [jax.vmap(lambda row: jnp.bincount(row, length=names))(ids) for ids in (ids_in, ids_out)]
    # Examples without an output token are skipped.
    used = (counts[1] > 0) & (jnp.arange(names) > 0)
    by_rank = jnp.argsort(jnp.where(used, -(counts[0] + counts[1]), 1), axis=1, stable=True)
    rank = jnp.argsort(by_rank, axis=1)
    sides = []
    for ids, count in zip((ids_in, ids_out), counts, strict=True):
        order = jnp.argsort(_take(rank, ids), axis=1, stable=True)
        count = _take(jnp.where(used, count, 0), by_rank)
        first = jnp.cumsum(count, axis=1) - count
        sides.append(Side(order, jnp.argsort(order, axis=1), _take(used, ids), first, count))
    return *sides, jnp.max(jnp.sum(used, axis=1))


def _take(array: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.take_along_axis(array, _expand(places, array), axis=1)


def _expand(array: jax.Array, like: jax.Array) -> jax.Array:
    return array.reshape(*array.shape, *(1,) * (like.ndim - 2))
