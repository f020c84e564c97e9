"""Decoding caches: buffers in the `cache` collection, batch leading, one slot per position.

The first call with `ctx.decode` sees values for all positions and allocates; later calls see the token at `ctx.step`.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.context import SequenceContext


def extend(module: nn.Module, name: str, value: jax.Array, ctx: SequenceContext, axis: int = 1) -> jax.Array:
    """Writes `value` into the buffer `name` and returns what a decoding sublayer should read.

    Args:
        module: the sublayer that owns the buffer; call within its `nn.compact` method.
        name: name of the cache variable.
        value: [batch, length, ...] on the allocating call, [batch, 1, ...] afterwards.
        ctx: facts about the token, `ctx.decode` True.
        axis: the length axis, if it does not follow the batch axis.

    Returns:
        [batch, max_length, ...]: `value` itself on the allocating call, otherwise the buffer, filled up to `ctx.step`.
    """
    is_allocated = module.has_variable('cache', name)
    buffer = module.variable('cache', name, jnp.zeros_like, value)
    if not is_allocated:
        return value
    value = value.astype(buffer.value.dtype)
    buffer.value = jax.lax.dynamic_update_slice_in_dim(buffer.value, value, ctx.step, axis)
    return buffer.value


def visible(max_length: int, ctx: SequenceContext) -> jax.Array:
    """[max_length] bool: the positions that the token at `ctx.step` may see, itself included."""
    return jnp.arange(max_length) <= ctx.step


def beams_as_queries(x: jax.Array, memory_rows: int) -> jax.Array:
    """[memory_rows * beams, length, embed] of a decoding call -> [memory_rows, beams * length, embed].

    Beams of one sequence are next to each other and share its memory. A sublayer that reads the memory, and in which
    queries do not see each other, treats the beams as queries of one row, so the memory is not repeated for each beam.
    """
    return x.reshape(memory_rows, -1, x.shape[-1])
