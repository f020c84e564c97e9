"""Greedy decoding with a cache: one token of every sequence per step, until all have ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Cache = Any
# (tokens [batch, 1], cache) -> (logits [batch, vocab], cache)
StepFunction = Callable[[jax.Array, Cache], tuple[jax.Array, Cache]]


def greedy(step: StepFunction, cache: Cache, batch_size: int, max_length: int, eos_id: int = 1) -> jax.Array:
    """The most likely token at each step.

    Args:
      step: one decoding step.
      cache: an allocated cache for `max_length` positions.
      batch_size: number of sequences.
      max_length: most tokens to generate, the end token included.
      eos_id: the token that ends a sequence.

    Returns:
      [batch, max_length] int32, 0 after the end token.
    """

    def keep_going(state) -> jax.Array:
        index, _, _, ended, _ = state
        return (index < max_length) & ~jnp.all(ended)

    def body(state):
        index, tokens, last, ended, cache = state
        logits, cache = step(last, cache)
        token = jnp.where(ended, 0, jnp.argmax(logits, axis=-1).astype(jnp.int32))
        tokens = jax.lax.dynamic_update_slice_in_dim(tokens, token[:, None], index, axis=1)
        return index + 1, tokens, token[:, None], ended | (token == eos_id), cache

    start = (
        jnp.zeros((), jnp.int32),
        jnp.zeros((batch_size, max_length), jnp.int32),
        jnp.zeros((batch_size, 1), jnp.int32),  # T5 starts a sequence with the padding id.
        jnp.zeros((batch_size,), bool),
        cache,
    )
    return jax.lax.while_loop(keep_going, body, start)[1]
