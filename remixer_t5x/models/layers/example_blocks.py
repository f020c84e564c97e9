"""Splits packed rows into blocks with tokens of a single example, for computations on one example at a time.

The tokens of a row are sorted by example, starting with the longest example (rank 0). Step k of a loop processes the
example of rank k in every row, in as many blocks as the longest of these examples requires. The k-th longest example of
a row of n tokens has at most n / k tokens, so the loop processes at most `n (1 + 1/2 + ... + 1/E) + E * BLOCK_LENGTH`
tokens for E examples, instead of `n E` in a separate pass over the row for each example.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Number of tokens in a block. Smaller blocks need less padding for short examples, but more steps for long examples.
BLOCK_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class TokenOrder:
    """Order of each row's input or output tokens, sorted by the rank of their example.

    Attributes:
        order: [batch, n] int32, the row position of each sorted token.
        inverse: [batch, n] int32, the sorted position of each token in the row.
        is_used: [batch, n] bool, whether each token's example has an output token, and therefore a rank.
        first: [batch, ranks] int32, the sorted position of the first token of each example.
        count: [batch, ranks] int32, the number of tokens of each example.
    """

    order: jax.Array
    inverse: jax.Array
    is_used: jax.Array
    first: jax.Array
    count: jax.Array

    def sort(self, array: jax.Array) -> jax.Array:
        """Sorts the tokens of an array [batch, n, ...] by example, and pads it to [batch, n + BLOCK_LENGTH, ...].

        With the padding, the last block does not extend beyond the array.
        """
        rest = ((0, 0),) * (array.ndim - 2)
        return jnp.pad(_take_tokens(array, self.order), ((0, 0), (0, BLOCK_LENGTH), *rest))

    def unsort(self, array: jax.Array) -> jax.Array:
        """Inverts `sort`, and zeroes the tokens of examples without a rank."""
        return jnp.where(_append_axes(self.is_used, array), _take_tokens(array, self.inverse), 0)

    def zeros_in_sorted_order(self, like: jax.Array) -> jax.Array:
        """Returns zeros with the shape and dtype of `sort(like)`."""
        batch, length = self.order.shape
        return jnp.zeros((batch, length + BLOCK_LENGTH, *like.shape[2:]), like.dtype)

    def loop_over_blocks(
        self, rank: jax.Array, body: Callable[[Callable, Callable, jax.Array, Any], Any], start: Any
    ) -> Any:
        """Runs `body(read, write, is_member, carry) -> carry` for each block of the examples with this rank.

        `read` slices a block [batch, tokens, ...] from a sorted array, `write` writes a block to a sorted array, and
        `is_member` [batch, tokens] is False at tokens of other examples. Call this method for all ranks in order, so
        that later blocks overwrite what `body` writes for tokens of other examples.
        """
        first, count = self.first[:, rank], self.count[:, rank]
        length = self.order.shape[1]

        def run_block(index, carry):
            position = jnp.minimum(first + index * BLOCK_LENGTH, length)
            is_member = position[:, None] + jnp.arange(BLOCK_LENGTH) < (first + count)[:, None]

            def read(array):
                return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, BLOCK_LENGTH))(array, position)

            def write(array, values):
                put = jax.vmap(lambda row, values, at: jax.lax.dynamic_update_slice_in_dim(row, values, at, 0))
                return put(array, values.astype(array.dtype), position)

            return body(read, write, is_member, carry)

        def run_whole_row(carry):
            position = jnp.arange(length)
            is_member = (position >= first[:, None]) & (position < (first + count)[:, None])

            def write(array, values):
                updated = jnp.where(_append_axes(is_member, values), values.astype(array.dtype), array[:, :length])
                return array.at[:, :length].set(updated)

            return body(lambda array: array[:, :length], write, is_member, carry)

        longest = jnp.max(count)
        blocks = (longest + BLOCK_LENGTH - 1) // BLOCK_LENGTH
        # One matmul for the whole row is faster than one for each of many blocks.
        return jax.lax.cond(
            2 * longest > length, run_whole_row, lambda carry: jax.lax.fori_loop(0, blocks, run_block, carry), start
        )


def sort_by_example(ids_in: jax.Array, ids_out: jax.Array) -> tuple[TokenOrder, TokenOrder, jax.Array]:
    """Returns the orders of the input and output tokens, and the number of ranks.

    `ids_in` [batch, n] and `ids_out` [batch, m] are example ids starting with 1; 0 is padding. The tokens of an example
    need not be contiguous.
    """
    num_ids = ids_in.shape[1] + ids_out.shape[1] + 1
    counts = [jax.vmap(lambda row: jnp.bincount(row, length=num_ids))(ids) for ids in (ids_in, ids_out)]
    # Examples without output tokens need no computation.
    used = (counts[1] > 0) & (jnp.arange(num_ids) > 0)
    by_rank = jnp.argsort(jnp.where(used, -(counts[0] + counts[1]), 1), axis=1, stable=True)
    rank = jnp.argsort(by_rank, axis=1)
    sides = []
    for ids, count in zip((ids_in, ids_out), counts, strict=True):
        order = jnp.argsort(_take_tokens(rank, ids), axis=1, stable=True)
        count = _take_tokens(jnp.where(used, count, 0), by_rank)
        first = jnp.cumsum(count, axis=1) - count
        sides.append(TokenOrder(order, jnp.argsort(order, axis=1), _take_tokens(used, ids), first, count))
    return *sides, jnp.max(jnp.sum(used, axis=1))


def _take_tokens(array: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(array, _append_axes(positions, array), axis=1)


def _append_axes(array: jax.Array, like: jax.Array) -> jax.Array:
    return array.reshape(*array.shape, *(1,) * (like.ndim - 2))
