"""T5's relative position bias (Raffel et al. 2019, section 2.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.context import SequenceContext


def relative_position_bucket(
    relative_position: jax.Array, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> jax.Array:
    """Bucket of `key position - query position`, int32 in [0, num_buckets).

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`, beyond which
    all distances share the last one. Bidirectional use gives each sign half of the buckets; otherwise keys ahead of
    the query fall into bucket 0.
    """
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(relative_position > 0, num_buckets, 0)
        distance = jnp.abs(relative_position)
    else:
        offset = 0
        distance = jnp.maximum(-relative_position, 0)
    num_exact = num_buckets // 2
    log_ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / num_exact)
    log_share = log_ratio / jnp.log(max_distance / num_exact)
    log_bucket = num_exact + (log_share * (num_buckets - num_exact)).astype(jnp.int32)
    log_bucket = jnp.minimum(log_bucket, num_buckets - 1)
    return (offset + jnp.where(distance < num_exact, distance, log_bucket)).astype(jnp.int32)


def _spread_over_diagonals(values: jax.Array, length: int) -> jax.Array:
    """[heads, 2 * length - 1] values of relative positions -(length-1)..length-1 -> [heads, query, key].

    `out[:, i, j] = values[:, j - i + length - 1]`, by copying the values once per query and reading the flat copy with
    a row stride one shorter. Unlike a [query, key] gather, its gradient is a dense sum and not a scatter.
    """
    heads, count = values.shape
    padded = jnp.pad(values, ((0, 0), (0, 1)))  # [heads, 2 * length]
    flat = jnp.broadcast_to(padded[:, None], (heads, length, count + 1)).reshape(heads, -1)
    skewed = flat[:, : length * count].reshape(heads, length, count)
    return skewed[:, :, length - 1 :]


class RelativePositionBias(nn.Module):
    """A learned scalar per head and bucket of relative distance, added to attention logits.

    Rows are indexed by place in the row, not in the example: within one example both give the same distances, and
    attention masks every pair of tokens from different examples.
    """

    num_heads: int
    num_buckets: int = 32
    max_distance: int = 128

    @nn.compact
    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array:
        """float32 [1, heads, query, key]; one query, at `ctx.step`, and `length` keys while decoding."""
        table = self.param(
            'embedding',
            nn.with_logical_partitioning(
                nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'), (axes.HEADS, axes.RELPOS_BUCKETS)
            ),
            (self.num_heads, self.num_buckets),
            jnp.float32,
        )
        if ctx.step is None:
            relative = jnp.arange(1 - length, length)
        else:
            relative = jnp.arange(length) - ctx.step
        bucket = relative_position_bucket(
            relative,
            bidirectional=not ctx.causal,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        values = jnp.take(table, bucket, axis=1)  # [heads, distances]
        bias = values[:, None] if ctx.step is not None else _spread_over_diagonals(values, length)
        return bias[None]
