"""SequenceContext: the information about each token that a sublayer receives in addition to its features.

The model passes the context down, and each sublayer derives its own masks from it: attention computes a [query, key]
mask from the segment ids, and Remixer selects rows of H by the positions.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class SequenceContext:
    """Describes a [batch, length] block of tokens.

    Attributes:
        segment_ids: [batch, length] int32; 1..n identifies the example of a token, 0 is padding.
        positions: [batch, length] int32; index of the token within its example.
        position_bias: [1, heads, query, key], a `DistanceBias`, or None; computed once by a stack for its attention
            sublayers.
        num_keys: number of keys of a query: the length of the row, or the slots of the caches while decoding; set by a
            stack.
        memory: the encoder output, for cross-attention of a decoder; None elsewhere.
        step: int32, index of the token while decoding one token at a time: a scalar, or [batch] after prompts of
            different lengths; None elsewhere.
        prefix: [batch, length] bool, tokens at the start of an example that are visible to all of its tokens even if
            `causal` is set; None if there are none. A causal sublayer that mixes tokens either supports it or raises
            UserError (`layers.checks.refuse_prefix`).
        causal: whether a token sees only itself and earlier tokens.
        decode: whether caches in the `cache` collection are allocated (first call) or extended (later calls).
        cache_slots: number of positions to allocate if the first call contains the tokens of a prompt, which the caches
            then store; None if it contains dummy tokens, one for each position.
        deterministic: whether dropout is disabled.
        packed: whether a row may contain several examples. If False, sublayers can skip per-example gathers.
        attention: implementation of attention, one of `kernels.attention.api.IMPLEMENTATIONS`; set by a stack.
    """

    segment_ids: jax.Array
    positions: jax.Array
    position_bias: Any = None
    memory: Memory | None = None
    step: jax.Array | None = None
    prefix: jax.Array | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    decode: bool = struct.field(pytree_node=False, default=False)
    cache_slots: int | None = struct.field(pytree_node=False, default=None)
    num_keys: int | None = struct.field(pytree_node=False, default=None)
    deterministic: bool = struct.field(pytree_node=False, default=True)
    packed: bool = struct.field(pytree_node=False, default=False)
    attention: str = struct.field(pytree_node=False, default='auto')

    @property
    def is_token(self) -> jax.Array:
        """[batch, length] bool, False at padding."""
        return self.segment_ids > 0


@struct.dataclass
class Memory:
    """The encoder output `hidden` [batch, memory_length, embed] and the context of its tokens."""

    hidden: jax.Array
    context: SequenceContext


def describe_tokens(
    tokens: jax.Array, segment_ids: jax.Array | None = None, positions: jax.Array | None = None, **flags
) -> SequenceContext:
    """Returns the context of [batch, length] tokens; trailing zeros are padding.

    Args:
        tokens: [batch, length] int32.
        segment_ids: [batch, length] if rows are packed; None if each row is one example.
        positions: [batch, length]; None derives them from the segments.
        **flags: other fields of `SequenceContext`.
    """
    batch, length = tokens.shape
    packed = segment_ids is not None
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if segment_ids is None:
        segment_ids = (index < token_counts(tokens)[:, None]).astype(jnp.int32)
        positions = index
    elif positions is None:
        is_start = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        positions = index - jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)
    return SequenceContext(segment_ids=segment_ids, positions=positions, packed=packed, **flags)


def token_counts(tokens: jax.Array) -> jax.Array:
    """Returns the length of each row up to its last nonzero id, [batch] int32; `tokens` are [batch, length]."""
    lengths = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(tokens > 0, lengths, 0), axis=1, initial=0)
