"""Which tokens a token may attend to: as segments, from which a kernel decides for itself, or as a mask."""

import jax
import jax.numpy as jnp
from flax import struct

from remixer_t5x.context import SequenceContext
from remixer_t5x.models.layers import cache


@struct.dataclass
class Visibility:
    """Which keys each query of a row sees, without a [query, key] array.

    Attributes:
        query_segments: [batch, queries] int32, the example that a query belongs to; None where a row is one example, of
            which each query sees all tokens.
        key_segments: [batch, keys] int32, the example that a key belongs to; 0 is padding.
        causal: a query sees no key behind its own place in the row.
        key_prefix: [batch, keys] bool, the keys that queries of their example see from any place; None for no such key.
    """

    query_segments: jax.Array | None
    key_segments: jax.Array
    causal: bool = struct.field(pytree_node=False, default=False)
    key_prefix: jax.Array | None = None

    def mask(self) -> jax.Array:
        """bool, broadcastable to [batch, 1, queries, keys]; True where a query sees a key."""
        if self.query_segments is None:
            allowed = (self.key_segments > 0)[:, None, None, :]
        else:
            allowed = self.query_segments[:, None, :, None] == self.key_segments[:, None, None, :]
        if not self.causal:
            return allowed
        before = jnp.tri(self.key_segments.shape[1], dtype=bool)
        return allowed & (before if self.key_prefix is None else before | self.key_prefix[:, None, None, :])


def in_sequence(ctx: SequenceContext) -> Visibility:
    """Which tokens of its own sequence a token sees."""
    return Visibility(ctx.segment_ids if ctx.packed else None, ctx.segment_ids, ctx.causal, ctx.prefix)


def in_memory(ctx: SequenceContext, memory_ctx: SequenceContext) -> Visibility:
    """Which tokens of the encoder a token of the decoder sees."""
    return Visibility(ctx.segment_ids if ctx.packed else None, memory_ctx.segment_ids)


def while_decoding(ctx: SequenceContext, num_keys: int) -> jax.Array:
    """bool, broadcastable to [batch, 1, queries, keys]: the cached tokens that a decoding call sees."""
    if ctx.step is None:
        return in_sequence(ctx).mask()
    return jnp.atleast_2d(cache.visible(num_keys, ctx))[:, None, None]
