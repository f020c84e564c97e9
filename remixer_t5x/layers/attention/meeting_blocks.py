"""Which blocks of a packed row's queries and keys can meet, so that a kernel leaves out the others."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Above every number of an example.
_ABOVE = jnp.iinfo(jnp.int32).max


class Meetings(NamedTuple):
    """For each block the first block that it meets and the one after the last; between them all are computed.

    Attributes:
        of_queries: [batch, blocks of queries, 2] int32, blocks of keys.
        of_keys: [batch, blocks of keys, 2] int32, blocks of queries.
    """

    of_queries: Any
    of_keys: Any


def meetings(query_segments: jax.Array, key_segments: jax.Array, block: int, causal: bool) -> Meetings:
    """Blocks meet where their ranges of examples overlap.

    A query that sees no key averages all of them, as the formula does, so its block meets every block.

    Args:
        query_segments, key_segments: [batch, length] int32.
        block: number of tokens of a block.
        causal: a query sees no key behind its own place.
    """
    same = query_segments[:, :, None] == key_segments[:, None, :]
    if causal:
        same &= jnp.tri(same.shape[1], same.shape[2], dtype=bool)
    is_blind = _blocks(~jnp.any(same, axis=2), block, False).any(axis=2)
    query_range, key_range = _range(query_segments, block), _range(key_segments, block)
    meet = (query_range[0][:, :, None] <= key_range[1][:, None]) & (key_range[0][:, None] <= query_range[1][:, :, None])
    meet |= is_blind[:, :, None]
    if causal:
        meet &= jnp.tri(meet.shape[1], meet.shape[2], dtype=bool)
    return Meetings(_first_and_end(meet), _first_and_end(jnp.swapaxes(meet, 1, 2)))


def _blocks(tokens: jax.Array, block: int, fill: Any) -> jax.Array:
    """[batch, length] -> [batch, blocks, block]."""
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % block)), constant_values=fill)
    return tokens.reshape(tokens.shape[0], -1, block)


def _range(segments: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest example of each block."""
    return _blocks(segments, block, _ABOVE).min(axis=2), _blocks(segments, block, -1).max(axis=2)


def _first_and_end(meet: jax.Array) -> jax.Array:
    """Of [batch, blocks, others] the first and the end of the others, [batch, blocks, 2]; 0 and 0 for none."""
    index = jnp.arange(meet.shape[2])
    end = jnp.max(jnp.where(meet, index + 1, 0), axis=2)
    first = jnp.min(jnp.where(meet, index, end[:, :, None]), axis=2)
    return jnp.stack([first, end], axis=2).astype(jnp.int32)
