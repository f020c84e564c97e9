"""Defines `SequenceContext`, a description of the tokens of a batch from which sublayers derive their masks.

This module also checks the inputs and settings of sublayers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from remixer_t5x.errors import UserError


@struct.dataclass
class SequenceContext:
    """The context of a [batch, length] block of tokens.

    Attributes:
        segment_ids: [batch, length] int32; the example number of each token, starting at 1; 0 for padding.
        positions: [batch, length] int32; the index of each token within its example.
        position_bias: a [1, heads, query, key] array ([1 or batch, heads, 1, key] in decoding steps), a
            `DistanceBias`, or None; set by a stack for its attention sublayers.
        num_keys: number of keys per query: the row length or, while decoding, the number of cache slots; set by a
            stack.
        memory: the encoder output, for cross-attention; None in an encoder or a decoder-only model.
        step: int32, index of the token processed by a decoding step; a scalar, or [batch] if prompts have different
            lengths; None outside of decoding steps.
        prefix: [batch, length] bool, True for tokens at the start of an example that are visible to all tokens of the
            example even if `causal` is set, or None. A causal sublayer that mixes tokens either supports prefixes or
            raises UserError (`check_no_prefix`).
        causal: whether each token attends only to itself and earlier tokens.
        decode: whether caches in the `cache` collection are allocated (first call) or extended (later calls).
        cache_slots: number of cache positions to allocate if the first call contains a prompt; None if it contains one
            dummy token per position.
        deterministic: whether dropout is disabled.
        packed: whether a row may contain several examples.
        attention: one of `kernels.attention.IMPLEMENTATIONS`; set by a stack.
    """

    segment_ids: jax.Array
    positions: jax.Array
    position_bias: Any = None
    memory: EncoderMemory | None = None
    step: jax.Array | None = None
    prefix: jax.Array | None = None
    causal: bool = struct.field(pytree_node=False, default=False)
    decode: bool = struct.field(pytree_node=False, default=False)
    cache_slots: int | None = struct.field(pytree_node=False, default=None)
    num_keys: int = struct.field(pytree_node=False, default=0)
    deterministic: bool = struct.field(pytree_node=False, default=True)
    packed: bool = struct.field(pytree_node=False, default=False)
    attention: str = struct.field(pytree_node=False, default='auto')

    @property
    def is_token(self) -> jax.Array:
        """Token mask, [batch, length] bool; False at padding."""
        return self.segment_ids > 0


@struct.dataclass
class EncoderMemory:
    """The encoder output `hidden`, [batch, memory_length, embed], and the context of the input tokens."""

    hidden: jax.Array
    context: SequenceContext


def make_sequence_context(
    tokens: jax.Array, segment_ids: jax.Array | None = None, positions: jax.Array | None = None, **flags
) -> SequenceContext:
    """Returns the context of [batch, length] tokens, in which trailing zeros are padding.

    Args:
        tokens: [batch, length] int32.
        segment_ids: [batch, length] if rows are packed; None if each row is one example.
        positions: [batch, length], for packed rows; None derives them from the segments.
        **flags: other fields of `SequenceContext`.

    Raises:
        UserError: `positions` is passed without `segment_ids`.
    """
    batch, length = tokens.shape
    packed = segment_ids is not None
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if segment_ids is None:
        if positions is not None:
            raise UserError('positions must be omitted without segment_ids, because rows of one example start at 0')
        segment_ids = (index < count_tokens(tokens)[:, None]).astype(jnp.int32)
        positions = index
    elif positions is None:
        is_start = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        positions = index - jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)
    return SequenceContext(segment_ids=segment_ids, positions=positions, packed=packed, **flags)


def count_tokens(tokens: jax.Array) -> jax.Array:
    """Counts the tokens in each row of `tokens` [batch, length], excluding trailing zeros; returns [batch] int32."""
    lengths = jnp.arange(1, tokens.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(tokens > 0, lengths, 0), axis=1, initial=0)


def check_length(owner: str, max_length: int, length: int) -> None:
    """Raises UserError if `length` exceeds `max_length`. `owner` is the name of the class with this setting."""
    if length > max_length:
        raise UserError(
            f'{owner}.max_length must be at least the sequence length of {length} tokens, got {max_length}; '
            f'set the macro that it reads, MAX_INPUT_LENGTH or (in a decoder) MAX_TARGET_LENGTH, to {length}, '
            'or reduce TASK_FEATURE_LENGTHS'
        )


def check_no_prefix(ctx: SequenceContext, owner: str) -> None:
    """Raises UserError if `ctx` has a prefix, because the class named `owner` supports only causal mixing."""
    if ctx.prefix is not None:
        raise UserError(
            f'{owner} does not support bidirectional attention to a prefix; set PREFIX_LM = False to process '
            'the prefix from left to right, or use @attention.SelfAttention, @hyper_mixer.HyperMixer or '
            '@linear_attention.LinearAttention'
        )


def require_encoder_memory(ctx: SequenceContext, owner: str, alternative: str) -> EncoderMemory:
    """Returns the encoder output, `ctx.memory`.

    Raises UserError if there is no encoder; the message suggests the class named `alternative` instead of `owner`.
    """
    if ctx.memory is None:
        raise UserError(
            f'{owner} requires an encoder; use it in DECODER_SUBLAYERS of an encoder-decoder, or use '
            f'{alternative} instead'
        )
    return ctx.memory
