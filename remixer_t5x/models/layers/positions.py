"""Position biases of attention (T5's and ALiBi), rotary and absolute position embeddings, and lengths of rows."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.kernels.attention.formula import DistanceBias
from remixer_t5x.kernels.compile_target import target_platform
from remixer_t5x.models.layers.checks import check_length

# T5's lengths, for a model that is built without data.
DEFAULT_MAX_LENGTH = 512


def relative_position_bucket(
    relative_position: jax.Array, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> jax.Array:
    """Returns the bucket of `key position - query position`, int32 in [0, num_buckets).

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

        On devices whose attention kernel expands biases, returns a `DistanceBias` with the same values instead.
        """
        table = self.param(
            'embedding',
            nn.with_logical_partitioning(
                nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'), (axes.HEADS, axes.RELPOS_BUCKETS)
            ),
            (self.num_heads, self.num_buckets),
            jnp.float32,
        )
        bucket = relative_position_bucket(
            _relative_positions(length, ctx),
            bidirectional=not ctx.causal,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        return _to_bias(jnp.take(table, bucket, axis=1), ctx)


class AlibiBias(nn.Module):
    """`-slope * |query - key|` with a fixed slope for each head (ALiBi, Press et al. 2022); no parameters.

    The slopes are a geometric sequence from 2^(-8/n) to 2^-8, for the largest power of two n up to `num_heads`. Further
    heads take every second slope of the sequence for 2n heads, as in the paper's code. In an encoder both sides have
    the same slope.

    Attributes:
        num_heads: number of attention heads.
    """

    num_heads: ranges.Count

    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array | DistanceBias:
        """See `RelativePositionBias`."""
        power = 2 ** int(math.log2(self.num_heads))
        slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
        slopes += [2 ** (-4 * head / power) for head in range(1, 2 * (self.num_heads - power), 2)]
        distance = jnp.abs(_relative_positions(length, ctx)).astype(jnp.float32)
        return _to_bias(jnp.multiply.outer(-jnp.asarray(slopes, jnp.float32), distance), ctx)


def _relative_positions(length: int, ctx: SequenceContext) -> jax.Array:
    """Returns the distances `key - query` of a bias: [distances], or [batch, distances] if rows differ in step."""
    if ctx.step is None:
        return jnp.arange(1 - length, length)
    return jnp.arange(length) - (ctx.step[:, None] if ctx.step.ndim else ctx.step)


def _to_bias(values: jax.Array, ctx: SequenceContext) -> jax.Array | DistanceBias:
    """Returns the bias for values [heads, distances] at `_relative_positions`, or [heads, batch, distances]."""
    if ctx.step is not None:
        return jnp.moveaxis(values, 1, 0)[:, :, None] if ctx.step.ndim else values[None, :, None]
    bias = DistanceBias(values)
    # The formula would expand the values in every layer of the stack.
    return bias if target_platform() in ('tpu', 'gpu') and not ctx.decode else bias.spread()


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries or keys (RoPE, Su et al. 2021), as in Llama and Gemma; no parameters.

    Rotates the first n features of each head: the pair of features i and i + n / 2 by `position * theta^(-2i / n)`. So
    the product of a query and a key depends only on their distance.

    Attributes:
        theta: base of the wavelengths.
        fraction: share of a head's features that is rotated, n.
        scaling_factor: positions are divided by it, which extends a model to longer rows (Chen et al. 2023).
    """

    theta: ranges.Positive = 10_000.0
    fraction: ranges.PositiveShare = 1.0
    scaling_factor: ranges.Positive = 1.0

    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        """[batch, length, heads, kv] -> the same shape and dtype; positions are those in the example."""
        half = int(x.shape[-1] * self.fraction) // 2
        # Without packing all rows have the same positions.
        positions = ctx.positions if ctx.packed or ctx.step is not None else ctx.positions[:1]
        frequencies = 1.0 / self.theta ** (jnp.arange(half) / half)
        angles = positions[..., None, None] / self.scaling_factor * frequencies  # [batch or 1, length, 1, half]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin, rest)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def example_lengths(ctx: SequenceContext) -> jax.Array:
    """Returns the length of each token's example, float32 [batch, length]: at least 1, and undefined at padding."""
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
    """Returns the input length in TASK_FEATURE_LENGTHS, for sublayers with a `max_length`."""
    return (lengths or {}).get('inputs', DEFAULT_MAX_LENGTH)


def max_target_length(lengths: Mapping[str, int] | None = None, model_type: str = 'encoder_decoder') -> int:
    """Returns the target length in TASK_FEATURE_LENGTHS; a decoder-only model reads inputs and targets in one row."""
    if model_type == 'decoder_only' and lengths:
        return sum(lengths.values())
    return (lengths or {}).get('targets', DEFAULT_MAX_LENGTH)
