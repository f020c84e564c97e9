"""Decoding caches: buffers in the `cache` collection, batch first, with one slot per position.

The first call with `ctx.decode` receives values for all positions and allocates; each later call receives the token at
`ctx.step`. If the first call receives a prompt (`ctx.cache_slots`), the second call processes the last token of each
row again. So after the first call buffers hold all tokens of the prompt, and running sums all except the last
(`is_before_last`).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.context import SequenceContext


def extend(module: nn.Module, name: str, value: jax.Array, ctx: SequenceContext, axis: int = 1) -> jax.Array:
    """Writes `value` into the buffer `name` and returns the buffer.

    Args:
        module: the sublayer that owns the buffer; call within its `nn.compact` method.
        name: name of the cache variable.
        value: [batch, length, ...] on the allocating call, [batch, 1, ...] afterwards.
        ctx: facts about the token, `ctx.decode` True.
        axis: the length axis.

    Returns:
        [batch, max_length, ...]: `value` itself on the allocating call, otherwise the buffer, filled up to `ctx.step`.
    """
    is_allocated = module.has_variable('cache', name)
    buffer = module.variable('cache', name, _allocate, value, ctx.cache_slots, axis)
    if not is_allocated:
        return value
    value, step = value.astype(buffer.value.dtype), decoding_step(ctx)
    if step.ndim:
        write = jax.vmap(lambda row, token, step: jax.lax.dynamic_update_slice_in_dim(row, token, step, axis - 1))
        buffer.value = write(buffer.value, value, step)
    else:
        buffer.value = jax.lax.dynamic_update_slice_in_dim(buffer.value, value, step, axis)
    return buffer.value


def _allocate(value: jax.Array, slots: int | None, axis: int) -> jax.Array:
    if slots is None:
        return jnp.zeros_like(value)
    return jnp.pad(value, [(0, slots - value.shape[axis] if index == axis else 0) for index in range(value.ndim)])


def at_prompt_end(values: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Returns the initial cache of a sublayer that caches only one token: the second-last token of each prompt.

    Args:
        values: [batch, length, ...] of the allocating call.
        ctx: facts about its tokens.

    Returns:
        [batch, 1, ...], zeros if there is no such token.
    """
    if ctx.cache_slots is None:
        return jnp.zeros_like(values[:, :1])
    index = jnp.sum(ctx.is_token, axis=1) - 2
    tokens = jax.vmap(lambda row, index: jax.lax.dynamic_slice_in_dim(row, index, 1))(values, jnp.maximum(index, 0))
    return jnp.where((index >= 0).reshape(-1, *(1,) * (values.ndim - 1)), tokens, 0)


def is_before_last(ctx: SequenceContext) -> jax.Array:
    """Returns [batch, length] bool, True for all tokens of each row except the last one; rows have one example."""
    count = jnp.sum(ctx.is_token, axis=1, keepdims=True)
    return jnp.arange(ctx.segment_ids.shape[1]) < count - 1


def visible(max_length: int, ctx: SequenceContext, window: int | None = None) -> jax.Array:
    """Returns which positions are visible at `ctx.step`, bool [max_length]; [batch, max_length] if rows differ in step.

    With a `window`, only the token at `ctx.step` and the `window - 1` tokens before it are visible.
    """
    step = decoding_step(ctx)
    positions, step = jnp.arange(max_length), step[:, None] if step.ndim else step
    return positions <= step if window is None else (positions <= step) & (positions > step - window)


def decoding_step(ctx: SequenceContext) -> jax.Array:
    """Returns `ctx.step`, which is set when one token of each row is decoded."""
    assert ctx.step is not None
    return ctx.step


def beams_as_queries(x: jax.Array, memory_rows: int) -> jax.Array:
    """[memory_rows * beams, length, embed] of a decoding call -> [memory_rows, beams * length, embed].

    Beams of one sequence are adjacent and share its memory. A sublayer that reads the memory can treat them as queries
    of one row, so that the memory is not repeated for each beam.
    """
    return x.reshape(memory_rows, -1, x.shape[-1])
