"""Position biases for attention (T5 and ALiBi), rotary and absolute position embeddings, and sequence lengths."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext, check_length
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.attention_formula import DistanceBias
from remixer_t5x.kernels.compile_target import get_target_platform
from remixer_t5x.models.layers.dense import create_param

# Sequence length of models that are built without data, as in T5.
DEFAULT_MAX_LENGTH = 512

# Factory of modules that compute the position bias for a number of keys.
BiasFactory = Callable[..., Callable[[int, SequenceContext], jax.Array | DistanceBias]]
# Factory of modules that compute position embeddings of a given width.
EmbeddingFactory = Callable[..., Callable[[int, SequenceContext], jax.Array]]
# Factory of modules that rotate queries or keys.
RotaryFactory = Callable[..., Callable[[jax.Array, SequenceContext], jax.Array]]


def relative_position_bucket(
    relative_position: jax.Array, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128
) -> jax.Array:
    """Returns T5's bucket of each relative position, `key position - query position`, int32 in [0, num_buckets).

    Half of the buckets contain one distance each; the others divide the distances up to `max_distance` on a logarithmic
    scale, and the last bucket contains all larger distances. If `bidirectional`, keys before and after the query use
    separate halves of the buckets; otherwise, all keys after the query use bucket 0.

    Raises UserError if there are too few buckets, or if buckets with one distance each reach `max_distance`.
    """
    num_exact = num_buckets // (4 if bidirectional else 2)
    if num_exact < 1:
        raise UserError(
            f'RelativePositionBias.num_buckets must be at least 2, or 4 in an encoder, got {num_buckets}; '
            'set positions.RelativePositionBias.num_buckets = 32'
        )
    if max_distance <= num_exact:
        raise UserError(
            f'RelativePositionBias.max_distance must be above {num_exact} with {num_buckets} buckets, got '
            f'{max_distance}; increase it, or set positions.RelativePositionBias.num_buckets = {max_distance}'
        )
    if bidirectional:
        num_buckets //= 2
        offset = jnp.where(relative_position > 0, num_buckets, 0)
        distance = jnp.abs(relative_position)
    else:
        offset = 0
        distance = jnp.maximum(-relative_position, 0)
    log_share = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / num_exact) / jnp.log(max_distance / num_exact)
    log_bucket = num_exact + (log_share * (num_buckets - num_exact)).astype(jnp.int32)
    log_bucket = jnp.minimum(log_bucket, num_buckets - 1)
    return (offset + jnp.where(distance < num_exact, distance, log_bucket)).astype(jnp.int32)


class RelativePositionBias(nn.Module):
    """T5's relative position bias: a learned scalar for each head and distance bucket, added to attention logits.

    Packing needs no special case, because distances within an example do not depend on its position in the row.

    Attributes:
        max_distance: distances of at least this value share the last bucket.
    """

    num_heads: ranges.Count
    num_buckets: int = 32
    max_distance: int = 128

    @nn.compact
    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array | DistanceBias:
        """Returns the bias, float32 [1, heads, query, key] or, on TPUs and GPUs, an equivalent `DistanceBias`.

        In a decoding step, returns only the bias of the query at `ctx.step`, [1 or batch, heads, 1, key].
        """
        init = nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform')
        shape = (self.num_heads, self.num_buckets)
        table = create_param(self, 'embedding', init, (axes.HEADS, axes.RELPOS_BUCKETS), shape)
        bucket = relative_position_bucket(
            _compute_relative_positions(length, ctx),
            bidirectional=not ctx.causal,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        return _build_bias(jnp.take(table, bucket, axis=1), ctx)


class AlibiBias(nn.Module):
    """ALiBi (Press et al. 2022): the bias `-slope * |query - key|` with a fixed slope for each head.

    The slopes are a geometric sequence from 2^(-8/n) to 2^-8, with n the largest power of two up to `num_heads`. The
    remaining heads use every second slope of the sequence for 2n heads, as in the authors' code.
    """

    num_heads: ranges.Count

    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array | DistanceBias:
        """Returns the ALiBi bias in the same form as the bias of `RelativePositionBias`."""
        power = 2 ** int(math.log2(self.num_heads))
        slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
        slopes += [2 ** (-4 * head / power) for head in range(1, 2 * (self.num_heads - power), 2)]
        distance = jnp.abs(_compute_relative_positions(length, ctx)).astype(jnp.float32)
        return _build_bias(jnp.multiply.outer(-jnp.asarray(slopes, jnp.float32), distance), ctx)


def _compute_relative_positions(length: int, ctx: SequenceContext) -> jax.Array:
    """Returns the relative positions `key - query`: [distances] or, for per-row steps, [batch, distances]."""
    if ctx.step is None:
        return jnp.arange(1 - length, length)
    return jnp.arange(length) - (ctx.step[:, None] if ctx.step.ndim else ctx.step)


def _build_bias(values: jax.Array, ctx: SequenceContext) -> jax.Array | DistanceBias:
    """Builds an attention bias from values [heads, distances] or [heads, batch, distances]."""
    if ctx.step is not None:
        return jnp.moveaxis(values, 1, 0)[:, :, None] if ctx.step.ndim else values[None, :, None]
    bias = DistanceBias(values)
    # Without a kernel, expand the values here once instead of in the attention of every layer.
    return bias if get_target_platform() in ('tpu', 'gpu') and not ctx.decode else bias.expand_to_pairs()


class RotaryEmbedding(nn.Module):
    """Rotary position embedding of queries or keys (RoPE, Su et al. 2021), as in Llama and Gemma.

    Rotates the first n features of each head: features i and i + n / 2 form a pair, which is rotated by the angle
    `position * theta^(-2i / n)`. The product of a query and a key then depends only on their relative position.

    Attributes:
        theta: base of the wavelengths.
        fraction: fraction of each head's features to rotate, n / head_dim.
        scaling_factor: divisor of the positions, which extends a model to longer sequences (Chen et al. 2023).
    """

    theta: ranges.Positive = 10_000.0
    fraction: ranges.PositiveFraction = 1.0
    scaling_factor: ranges.Positive = 1.0

    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Rotates queries or keys x [batch, length, heads, kv] by the position of each token in its example."""
        half = int(x.shape[-1] * self.fraction) // 2
        # All rows have the same positions unless they are packed or at different decoding steps.
        positions = ctx.positions if ctx.packed or ctx.step is not None else ctx.positions[:1]
        frequencies = 1.0 / self.theta ** (jnp.arange(half) / half)
        angles = positions[..., None, None] / self.scaling_factor * frequencies  # [batch or 1, length, 1, half]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin, rest)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def compute_example_lengths(ctx: SequenceContext) -> jax.Array:
    """Returns the length of each token's example, float32 [batch, length]; at padding, any value of at least 1."""
    if not ctx.packed:
        count = jnp.sum(ctx.is_token, axis=1, keepdims=True)
        return jnp.broadcast_to(jnp.maximum(count, 1), ctx.positions.shape).astype(jnp.float32)
    ids, index = ctx.segment_ids, jnp.arange(ctx.segment_ids.shape[1])
    is_last = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    last = jax.lax.cummin(jnp.where(is_last, index, index[-1]), axis=1, reverse=True)
    return (ctx.positions + last - index + 1).astype(jnp.float32)


class SinusoidalPositions(nn.Module):
    """Sinusoidal embeddings of the position in the example (Vaswani et al. 2017, section 3.5)."""

    @nn.compact
    def __call__(self, width: int, ctx: SequenceContext) -> jax.Array:
        """Returns the sines of all frequencies, then the cosines, float32 [batch, length, width]."""
        num_waves = -(-width // 2)
        exponents = jnp.arange(num_waves) * (2.0 / width)
        angles = ctx.positions[..., None].astype(jnp.float32) * jnp.power(10_000.0, -exponents)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[..., :width]


class LearnedPositions(nn.Module):
    """Learned embeddings of the position in the example.

    Attributes:
        max_length: number of positions; longer rows raise UserError.
    """

    max_length: ranges.Count

    @nn.compact
    def __call__(self, width: int, ctx: SequenceContext) -> jax.Array:
        """Returns the embeddings of all tokens, float32 [batch or 1, length, width]."""
        length = ctx.positions.shape[1]
        check_length('LearnedPositions', self.max_length, ctx.cache_slots or length)
        init, names = nn.initializers.normal(stddev=0.02), (axes.POSITIONS_IN, axes.EMBED)
        table = create_param(self, 'table', init, names, (self.max_length, width))
        if ctx.packed or ctx.step is not None:
            return jnp.take(table, ctx.positions, axis=0)
        # Use a slice, because its gradient is cheaper than the scatter in the gradient of a gather.
        return table[None, :length]


def max_input_length(lengths: Mapping[str, int] | None = None) -> int:
    """Returns the input length set in TASK_FEATURE_LENGTHS, which sublayers use as `max_length`."""
    return (lengths or {}).get('inputs', DEFAULT_MAX_LENGTH)


def max_target_length(lengths: Mapping[str, int] | None = None, model_type: str = 'encoder_decoder') -> int:
    """Returns the target length set in TASK_FEATURE_LENGTHS, which sublayers use as `max_length`.

    For decoder-only models, returns the sum of the lengths, because each row contains inputs and targets.
    """
    if model_type == 'decoder_only' and lengths:
        return sum(lengths.values())
    return (lengths or {}).get('targets', DEFAULT_MAX_LENGTH)
