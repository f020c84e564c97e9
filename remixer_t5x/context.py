"""SequenceContext: what a sublayer may know about each token in addition to its features.

Facts travel down the model; masks are made where they are read. An attention sublayer turns segment ids into a
[query, key] mask, Remixer turns positions into rows of H, and neither needs to know that the other exists.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class SequenceContext:
    """The facts about a [batch, length] block of tokens.

    Attributes:
        segment_ids: [batch, length] int32; 1..n names the example a token belongs to, 0 is padding.
        positions: [batch, length] int32; index of the token in its own example, restarting with each example.
        position_bias: [1, heads, query, key], a `DistanceBias`, or None; made once by a stack, read by its attention
            sublayers only.
        num_keys: how many positions a query of this row can see: the row's length, or the slots of the caches while
            decoding; set by a stack.
        memory: the encoder's output, for sublayers of a decoder that read it; None elsewhere.
        step: int32 while decoding one token at a time, the index of that token: a scalar, or [batch] after prompts of
            different lengths; None elsewhere.
        prefix: [batch, length] bool, the tokens that tokens of the same example see from anywhere, and that see each
            other in both directions, in spite of `causal`; None if no token does. They come first in their
            example. A causal sublayer that mixes tokens reads it, or refuses it (`layers.checks.refuse_prefix`).
        causal: whether a token may see only itself and what comes before it.
        decode: whether caches in the `cache` collection are allocated (first call) or extended (later calls).
        cache_slots: the number of positions to allocate, if the first call has the tokens of a prompt, which the caches
            then keep; None where it has dummy tokens, one for each position.
        deterministic: True switches dropout off.
        packed: whether a row may hold several examples. False lets sublayers skip per-example gathers.
        attention: how attention sublayers compute, one of `kernels.attention.api.IMPLEMENTATIONS`; set by a stack.
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
    """The encoder's output `hidden` [batch, memory_length, embed] and the facts about its tokens."""

    hidden: jax.Array
    context: SequenceContext


def describe_tokens(
    tokens: jax.Array, segment_ids: jax.Array | None = None, positions: jax.Array | None = None, **flags
) -> SequenceContext:
    """Context of [batch, length] tokens; trailing zeros are padding.

    Args:
        tokens: [batch, length] int32.
        segment_ids: [batch, length] when rows are packed; None means that each row is one example.
        positions: [batch, length]; derived from the segments where None.
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
    """The length of each row up to its last id that is not 0, [batch] int32; `tokens` are [batch, length]."""
    places = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(tokens > 0, places, 0), axis=1, initial=0)
