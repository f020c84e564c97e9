"""Decoding caches: buffers in the `cache` collection, batch leading, one slot per position.

The first call with `ctx.decode` sees values for all positions and allocates; later calls see the token at `ctx.step`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.context import SequenceContext


def extend(module: nn.Module, name: str, value: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Writes `value` into the buffer `name` and returns what a decoding sublayer should read.

    Args:
      module: the sublayer that owns the buffer; call within its `nn.compact` method.
      name: name of the cache variable.
      value: [batch, length, ...] on the allocating call, [batch, 1, ...] afterwards.
      ctx: facts about the token, `ctx.decode` True.

    Returns:
      [batch, max_length, ...]: `value` itself on the allocating call, else the buffer, filled up to `ctx.step`.
    """
    is_allocated = module.has_variable('cache', name)
    buffer = module.variable('cache', name, jnp.zeros_like, value)
    if not is_allocated:
        return value
    buffer.value = jax.lax.dynamic_update_slice_in_dim(buffer.value, value.astype(buffer.value.dtype), ctx.step, axis=1)
    return buffer.value


def visible(max_length: int, ctx: SequenceContext) -> jax.Array:
    """[max_length] bool: the positions that the token at `ctx.step` may see, itself included."""
    return jnp.arange(max_length) <= ctx.step
