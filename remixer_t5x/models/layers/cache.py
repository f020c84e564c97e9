"""Decoding caches: buffers in Flax's `cache` collection with a leading batch axis and one slot per position.

The first call with `ctx.decode` allocates the buffers (the allocating call); each later call receives the token at
`ctx.step`. If the first call receives a prompt (`ctx.cache_slots`), the second call processes the last token of each
row again, so running sums over the prompt must exclude this token (`mask_before_last_token`).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x.context import SequenceContext


def update_cache(module: nn.Module, name: str, value: jax.Array, ctx: SequenceContext, axis: int = 1) -> jax.Array:
    """Writes `value` into the cache variable `name`; call within the `nn.compact` method of `module`.

    In the allocating call, `value` is [batch, length, ...] and is returned unchanged. In later calls, `value` is
    [batch, 1, ...], and the buffer [batch, max_length, ...] is returned, filled up to `ctx.step`. The length axis is
    `axis`.
    """
    is_allocated = module.has_variable('cache', name)
    buffer = module.variable('cache', name, _allocate_buffer, value, ctx.cache_slots, axis)
    if not is_allocated:
        return value
    value, step = value.astype(buffer.value.dtype), get_decoding_step(ctx)
    if step.ndim:
        write = jax.vmap(lambda row, token, step: jax.lax.dynamic_update_slice_in_dim(row, token, step, axis - 1))
        buffer.value = write(buffer.value, value, step)
    else:
        buffer.value = jax.lax.dynamic_update_slice_in_dim(buffer.value, value, step, axis)
    return buffer.value


def _allocate_buffer(value: jax.Array, slots: int | None, axis: int) -> jax.Array:
    if slots is None:
        return jnp.zeros_like(value)
    return jnp.pad(value, [(0, slots - value.shape[axis] if index == axis else 0) for index in range(value.ndim)])


def values_at_prompt_end(values: jax.Array, ctx: SequenceContext, count: int = 1) -> jax.Array:
    """Returns the initial cache of a sublayer that caches the values of the last `count` tokens.

    Args:
        values: values of the allocating call, [batch, length, ...].
        ctx: context of the tokens of the allocating call.
        count: number of tokens to cache.

    Returns:
        [batch, count, ...]: the values of the tokens before the last token of each prompt; zeros before the first
        token, and without a prompt.
    """
    if ctx.cache_slots is None:
        return jnp.zeros((values.shape[0], count, *values.shape[2:]), values.dtype)
    # padded[:, i : i + count] contains the `count` tokens before token i.
    padded = jnp.pad(values, ((0, 0), (count, 0), *((0, 0),) * (values.ndim - 2)))
    last = jnp.maximum(jnp.sum(ctx.is_token, axis=1) - 1, 0)
    return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, count))(padded, last)


def mask_before_last_token(ctx: SequenceContext) -> jax.Array:
    """Returns a mask of all tokens except the last token of each row, [batch, length] bool; rows must not be packed."""
    count = jnp.sum(ctx.is_token, axis=1, keepdims=True)
    return jnp.arange(ctx.segment_ids.shape[1]) < count - 1


def visible_positions(max_length: int, ctx: SequenceContext, window: int | None = None) -> jax.Array:
    """Returns a mask of the positions visible at `ctx.step`, [max_length] or [batch, max_length] for per-row steps."""
    step = get_decoding_step(ctx)
    positions, step = jnp.arange(max_length), step[:, None] if step.ndim else step
    return positions <= step if window is None else (positions <= step) & (positions > step - window)


def get_decoding_step(ctx: SequenceContext) -> jax.Array:
    """Returns `ctx.step`, which must be set."""
    assert ctx.step is not None
    return ctx.step


def reshape_beams_to_queries(x: jax.Array, memory_rows: int) -> jax.Array:
    """Reshapes [memory_rows * beams, length, embed] to [memory_rows, beams * length, embed] for cross-attention.

    The beams of a sequence are adjacent and share its memory. Treating the beams as queries of one row avoids repeating
    the memory for each beam.
    """
    return x.reshape(memory_rows, -1, x.shape[-1])
