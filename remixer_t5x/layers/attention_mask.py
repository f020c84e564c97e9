"""Masks of which tokens may attend to which, made from a context by the sublayer that reads them."""

import jax
import jax.numpy as jnp

from remixer_t5x.context import SequenceContext
from remixer_t5x.layers import cache


def self_attention_mask(ctx: SequenceContext, num_keys: int) -> jax.Array:
    """Which tokens of its own sequence a token may see, broadcastable to [batch, 1, q, k]."""
    if ctx.step is not None:
        return cache.visible(num_keys, ctx)[None, None, None]
    if ctx.packed:
        allowed = ctx.segment_ids[:, None, :, None] == ctx.segment_ids[:, None, None, :]
    else:
        allowed = ctx.is_token[:, None, None, :]
    return allowed & jnp.tri(num_keys, dtype=bool) if ctx.causal else allowed


def memory_mask(ctx: SequenceContext, memory_ctx: SequenceContext) -> jax.Array:
    """Which tokens of the encoder a decoder token may see, broadcastable to [batch, 1, q, k]."""
    if ctx.packed:
        return ctx.segment_ids[:, None, :, None] == memory_ctx.segment_ids[:, None, None, :]
    return memory_ctx.is_token[:, None, None, :]
