"""T5's relative position bias (Raffel et al. 2019, section 2.1), position embeddings, and lengths of rows."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.kernels.attention.formula import DistanceBias
from remixer_t5x.kernels.compile_target import target_platform
from remixer_t5x.models.layers.checks import check_length

# T5's lengths, for a model without data.
DEFAULT_MAX_LENGTH = 512


def relative_position_bucket(
    relative_position: jax.Array, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> jax.Array:
    """Bucket of `key position - query position`, int32 in [0, num_buckets).

    Half of the buckets hold one distance each. The others grow logarithmically up to `max_distance`, and all larger
    distances share the last bucket. If `bidirectional`, each sign has half of the buckets; otherwise keys ahead of the
    query fall into bucket 0.
    """
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(relative_position > 0, num_buckets, 0)
        distance = jnp.abs(relative_position)
    else:
        offset = 0
        distance = jnp.maximum(-relative_position, 0)
    num_exact = num_buckets // 2
    log_share = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / num_exact) / jnp.log(max_distance / num_exact)
    log_bucket = num_exact + (log_share * (num_buckets - num_exact)).astype(jnp.int32)
    log_bucket = jnp.minimum(log_bucket, num_buckets - 1)
    return (offset + jnp.where(distance < num_exact, distance, log_bucket)).astype(jnp.int32)


class RelativePositionBias(nn.Module):
    """A learned scalar per head and bucket of relative distance, added to attention logits.

    Distances are measured in the row. Within an example these are the distances in the example, and attention masks
    pairs of tokens from different examples.

    Attributes:
        num_heads: number of attention heads.
        num_buckets: number of buckets of distances.
        max_distance: the distance from which all larger ones share a bucket.
    """

    num_heads: ranges.Count
    num_buckets: int = 32
    max_distance: int = 128

    @nn.compact
    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array | DistanceBias:
        """float32 [1 or batch, heads, query, key]; while decoding, one query at `ctx.step` and `length` keys.

        A `DistanceBias` with the same values on devices whose attention kernel expands it.
        """
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
            relative = jnp.arange(length) - (ctx.step[:, None] if ctx.step.ndim else ctx.step)
        bucket = relative_position_bucket(
            relative,
            bidirectional=not ctx.causal,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        values = jnp.take(table, bucket, axis=1)  # [heads, distances]
        if ctx.step is not None:
            return jnp.moveaxis(values, 1, 0)[:, :, None] if ctx.step.ndim else values[None, :, None]
        bias = DistanceBias(values)
        # The formula would expand the values in every layer of the stack.
        return bias if target_platform() in ('tpu', 'gpu') and not ctx.decode else bias.spread()


def example_lengths(ctx: SequenceContext) -> jax.Array:
    """The number of tokens of each token's example, float32 [batch, length]; at least 1, and undefined at padding."""
    if not ctx.packed:
        count = jnp.sum(ctx.is_token, axis=1, keepdims=True)
        return jnp.broadcast_to(jnp.maximum(count, 1), ctx.positions.shape).astype(jnp.float32)
    ids, index = ctx.segment_ids, jnp.arange(ctx.segment_ids.shape[1])
    is_last = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = jax.lax.cummin(jnp.where(is_last, index, index[-1]), axis=1, reverse=True)
    return (ctx.positions + last - index + 1).astype(jnp.float32)


class SinusoidalPositions(nn.Module):
    """Sines and cosines of a token's position in its example (Vaswani et al. 2017, section 3.5)."""

    @nn.compact
    def __call__(self, width: int, ctx: SequenceContext) -> jax.Array:
        """float32 [batch, length, width]: sines in the first half of the features, cosines in the second."""
        num_waves = -(-width // 2)
        exponents = jnp.arange(num_waves) * (2.0 / width)
        angles = ctx.positions[..., None].astype(jnp.float32) * jnp.power(10_000.0, -exponents)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[..., :width]


class LearnedPositions(nn.Module):
    """A learned vector for each position in an example.

    Attributes:
        max_length: number of positions; longer rows raise UserError.
    """

    max_length: ranges.Count

    @nn.compact
    def __call__(self, width: int, ctx: SequenceContext) -> jax.Array:
        """float32 [batch or 1, length, width]."""
        length = ctx.positions.shape[1]
        check_length('LearnedPositions', self.max_length, ctx.cache_slots or length)
        init = nn.with_logical_partitioning(nn.initializers.normal(stddev=0.02), (axes.POSITIONS_IN, axes.EMBED))
        table = self.param('table', init, (self.max_length, width), jnp.float32)
        if ctx.packed or ctx.step is not None:
            return jnp.take(table, ctx.positions, axis=0)
        # With one example per row a slice suffices, whose gradient needs no scatter.
        return table[None, :length]


def max_input_length(lengths: Mapping[str, int] | None = None) -> int:
    """The longest inputs by TASK_FEATURE_LENGTHS, for sublayers with a `max_length`."""
    return (lengths or {}).get('inputs', DEFAULT_MAX_LENGTH)


def max_target_length(lengths: Mapping[str, int] | None = None, model_type: str = 'encoder_decoder') -> int:
    """The longest targets by TASK_FEATURE_LENGTHS; a decoder-only model reads inputs and targets in one row."""
    if model_type == 'decoder_only' and lengths:
        return sum(lengths.values())
    return (lengths or {}).get('targets', DEFAULT_MAX_LENGTH)
