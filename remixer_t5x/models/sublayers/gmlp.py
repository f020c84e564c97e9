"""gMLP and aMLP (Liu et al. 2021, Pay Attention to MLPs, sections 2 and 4.3).

    Z = gelu(X U)                          U: [D, F]
    f(Z) = W LN(Z) + b                     W: [length, length] near zero, b: [length] ones
    Y = s(Z) V                             s(Z) = Z_1 * f(Z_2) and three other gates; V: [F/2 or F, D]

aMLP adds a tiny attention, which reads the same X, to f. The block is a whole layer: it does not need attention or a
feed-forward sublayer, but a layer may have them too.

Departures: projections have no biases, as everywhere in T5; padding is zeroed before W reads it (the paper leaves this
to be learned); W and b are indexed by position in the example, so packing changes nothing; in a decoder W is lower
triangular. The layout adds the norm before the block and its residual.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import target_platform
from remixer_t5x.kernels.diagonals import place_examples, spread_over_diagonals
from remixer_t5x.kernels.gelu import gelu, gelu_times, scaled_units
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.attend import in_sequence
from remixer_t5x.models.layers.checks import check_length, refuse_prefix
from remixer_t5x.models.layers.dense import Dense, Product
from remixer_t5x.models.layers.dropout import dropout
from remixer_t5x.models.layers.norms import LayerNorm

# (name, features) -> X U, whose GELU is Z.
Expansion = Callable[[str, int], jax.Array]
# X U -> f(Z); or with a second X U, whose GELU is Z_1, Z_1 * f(Z), which a GPU computes in one kernel.
SpatialProjection = Callable[..., jax.Array]

# The depth of a matmul on a GPU is a multiple of this: 16 bytes, by which cuBLAS reads.
_DEPTH = 8
# Near zero, so that f starts as its bias, one; not below Adafactor's floor for the scale of a parameter.
SPATIAL_INIT = nn.initializers.normal(stddev=1e-3)


def linear_gate(expand: Expansion, project: SpatialProjection, hidden_dim: ranges.Count) -> jax.Array:
    """`s(Z) = f(Z)`."""
    return project(expand('wi', hidden_dim))


def additive_gate(expand: Expansion, project: SpatialProjection, hidden_dim: ranges.Count) -> jax.Array:
    """`s(Z) = Z + f(Z)`."""
    inputs = expand('wi', hidden_dim)
    return gelu(inputs) + project(inputs)


def multiplicative_gate(expand: Expansion, project: SpatialProjection, hidden_dim: ranges.Count) -> jax.Array:
    """`s(Z) = Z * f(Z)`."""
    inputs = expand('wi', hidden_dim)
    return project(inputs, inputs)


def split_gate(expand: Expansion, project: SpatialProjection, hidden_dim: ranges.Count) -> jax.Array:
    """`s(Z) = Z_1 * f(Z_2)`, Z = Z_1 | Z_2: the paper's spatial gating unit.

    U is two matrices, because halves of one matrix would be on different devices if F is sharded.
    """
    if hidden_dim % 2:
        raise UserError(f'gmlp.split_gate needs an even GMLP.hidden_dim, got {hidden_dim}: give {hidden_dim + 1}')
    return project(expand('wi_1', hidden_dim // 2), expand('wi_0', hidden_dim // 2))


class FreeSpatial(nn.Module):
    """W as a free [max_length, max_length] matrix."""

    max_length: ranges.Count

    @nn.compact
    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array:
        """float32 [length, length], or [1, length] while decoding ([batch, 1, length] where every row has a step);
        [batch, length, length] for packed rows. With a prefix it has tokens ahead, which the caller masks.
        """
        init = nn.with_logical_partitioning(SPATIAL_INIT, (axes.POSITIONS_OUT, axes.POSITIONS_IN))
        matrix = self.param('kernel', init, (self.max_length, self.max_length), jnp.float32)
        if ctx.step is not None and ctx.step.ndim:
            rows = jnp.take(matrix[:, :length], ctx.step, axis=0)
            return jnp.where(cache.visible(length, ctx), rows, 0.0)[:, None]
        if ctx.step is not None:
            row = jax.lax.dynamic_slice_in_dim(matrix[:, :length], ctx.step, 1)
            return jnp.where(cache.visible(length, ctx), row, 0.0)
        matrix = matrix[:length, :length]
        if ctx.causal and ctx.prefix is None:
            matrix = jnp.tril(matrix)
        return place_examples(matrix, ctx.positions) if ctx.packed else matrix


class ToeplitzSpatial(nn.Module):
    """W with one number for each distance between two tokens, `W[i, j] = w[j - i]`: a convolution along the tokens.

    There are 2 * max_length - 1 parameters, or max_length in a decoder, where no token is ahead.
    """

    max_length: ranges.Count

    @nn.compact
    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array:
        """float32 [length, length], or [1, length] while decoding ([batch, 1, length] where every row has a step)."""
        # Of a decoder's weights none is for a token ahead.
        refuse_prefix(ctx, 'ToeplitzSpatial')
        count = self.max_length if ctx.causal else 2 * self.max_length - 1
        init = nn.with_logical_partitioning(SPATIAL_INIT, (axes.RELPOS_BUCKETS,))
        values = self.param('kernel', init, (count,), jnp.float32)
        if ctx.causal:
            values = jnp.pad(values, (0, length - 1))
        here = self.max_length - 1  # index of the value of distance 0
        if ctx.step is not None and ctx.step.ndim:
            rows = jax.vmap(lambda step: jax.lax.dynamic_slice_in_dim(values, here - step, length))(ctx.step)
            return rows[:, None]
        if ctx.step is not None:
            return jax.lax.dynamic_slice_in_dim(values, here - ctx.step, length)[None]
        # Within an example, distances in the row and in the example are the same.
        return spread_over_diagonals(values[None, here + 1 - length : here + length], length)[0]


class SpatialMixing(nn.Module):
    """`f(Z) = W LN(Z) + b` over the tokens that each token may see, [batch, length, features].

    Attributes:
        max_length: size of W and b; rows longer than this are refused.
        weights: factory of a module (length, ctx) -> W, `FreeSpatial` or `ToeplitzSpatial`.
    """

    max_length: ranges.Count
    weights: Callable[..., nn.Module]

    @nn.compact
    def __call__(
        self, inputs: jax.Array, gated: jax.Array | None, added: jax.Array | Product | None, ctx: SequenceContext
    ) -> jax.Array:
        """`f(Z) + added`, and `gelu(gated) * (f(Z) + added)` where `gated` is not None; Z is the GELU of `inputs`."""
        norm = LayerNorm(axis=axes.MLP, name='norm')
        if target_platform() == 'gpu' and not ctx.decode:
            return self._in_one_matmul(norm, inputs, gated, added, ctx)
        added = added.value() if isinstance(added, Product) else added
        activated = gelu(inputs)
        units = norm(activated)
        if ctx.decode:
            units = cache.extend(self, 'cached_units', units, ctx)
        weights, bias = self._weights_and_bias(units.shape[1], ctx)
        mixed = self._mix(weights, units, ctx) + bias.astype(units.dtype)
        mixed = mixed if added is None else mixed + added
        if gated is None:
            return mixed
        return (activated if gated is inputs else gelu(gated)) * mixed

    def _in_one_matmul(
        self,
        norm: LayerNorm,
        inputs: jax.Array,
        gated: jax.Array | None,
        added: jax.Array | Product | None,
        ctx: SequenceContext,
    ) -> jax.Array:
        """As `__call__`, with one matmul, because a GPU waits for what each of them reads and writes.

            W (scale Z + shift) + heads V + b = [W | heads | W 1] [scale Z ; V ; shift] + b

        Z is normalised, and heads V the product that is added. The gradients of W, heads, V and shift are in the two
        matmuls of the backward pass too.
        """
        scale, shift = norm.scale_and_bias(inputs.shape[-1])
        weights, bias = self._weights_and_bias(inputs.shape[1], ctx)
        weights = self._visible(weights, ctx)
        columns, rows = [weights, jnp.sum(weights, axis=-1, keepdims=True)], [shift[None]]
        if isinstance(added, Product):
            columns.append(added.left)
            rows.append(added.right)
        fill = -sum(part.shape[-1] for part in columns) % _DEPTH
        columns.append(jnp.zeros((*inputs.shape[:2], fill)))
        rows.append(jnp.zeros((fill, inputs.shape[-1])))
        left = jnp.concatenate([part.astype(inputs.dtype) for part in columns], axis=-1)
        below = jnp.concatenate([part.astype(inputs.dtype) for part in rows])
        below = jnp.broadcast_to(below, (inputs.shape[0], *below.shape))
        right = jnp.concatenate([scaled_units(inputs, scale, norm.epsilon), below], axis=1)
        mixed = jnp.einsum('bqk,bkf->bqf', left, right)
        bias = bias if bias.ndim == 3 else bias[None]
        if added is not None and not isinstance(added, Product):
            mixed = mixed + added
        factor = mixed.astype(jnp.float32) + bias
        return factor.astype(inputs.dtype) if gated is None else gelu_times(gated, factor)

    def _weights_and_bias(self, length: int, ctx: SequenceContext) -> tuple[jax.Array, jax.Array]:
        check_length('GMLP', self.max_length, length)
        weights = self.weights(max_length=self.max_length, name='weights')(length, ctx)
        init = nn.with_logical_partitioning(nn.initializers.ones, (axes.POSITIONS_OUT,))
        bias = self.param('bias', init, (self.max_length,), jnp.float32)
        return weights, self._at_tokens(bias, length, ctx)

    def _visible(self, weights: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Weights of each row, [batch, length, length]: zero where a token does not see another.

        A GPU would transpose the units to make one matmul of the batch. Weights for each row are smaller.
        """
        if ctx.prefix is not None:
            seen = in_sequence(ctx).mask()[:, 0]
        elif ctx.packed:
            seen = ctx.segment_ids[:, :, None] == ctx.segment_ids[:, None, :]
        else:
            seen = ctx.is_token[:, None, :]
        return jnp.where(seen, weights, 0.0)

    def _mix(self, weights: jax.Array, units: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.step is None and (ctx.packed or ctx.prefix is not None):
            weights = self._visible(weights, ctx)
        elif ctx.step is None:
            units = units * ctx.is_token[..., None].astype(units.dtype)
        equation = 'bqk,bkf->bqf' if weights.ndim == 3 else 'qk,bkf->bqf'
        return jnp.einsum(equation, weights.astype(units.dtype), units)

    def _at_tokens(self, bias: jax.Array, length: int, ctx: SequenceContext) -> jax.Array:
        """The bias of each token's position, broadcastable to [batch, length, features]."""
        if ctx.packed or ctx.step is not None:
            return jnp.take(bias, ctx.positions)[..., None]
        return bias[:length, None]


class GMLP(nn.Module):
    """Feed-forward sublayer whose hidden units are gated by a learned, input-independent mix of all tokens.

    Attributes:
        hidden_dim: number of hidden units, F; the split gate halves it.
        max_length: size of W and b; rows longer than this are refused.
        gate: `split_gate`, `multiplicative_gate`, `additive_gate` or `linear_gate`.
        spatial: factory of W, `ToeplitzSpatial` (the paper's language models) or `FreeSpatial`.
        attention: factory of a module whose result, an array or a `Product`, is added to f; None for gMLP,
            `tiny_attention.TinyAttention` for aMLP.
        dropout_rate: dropout on the gated units.
    """

    hidden_dim: ranges.Count
    max_length: ranges.Count
    gate: Callable[..., jax.Array] = split_gate
    spatial: Callable[..., nn.Module] = ToeplitzSpatial
    attention: Callable[..., nn.Module] | None = None
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        def expand(name: str, features: int) -> jax.Array:
            return Dense(features, (axes.EMBED, axes.MLP), name=name)(x)

        def project(inputs: jax.Array, gated: jax.Array | None = None) -> jax.Array:
            added = None
            if self.attention is not None:
                added = self.attention(features=inputs.shape[-1], name='attention')(x, ctx)
            return SpatialMixing(self.max_length, self.spatial, name='mixing')(inputs, gated, added, ctx)

        gated = self.gate(expand, project, self.hidden_dim)
        gated = dropout(self.dropout_rate, gated, deterministic=ctx.deterministic)
        return Dense(x.shape[-1], (axes.MLP, axes.EMBED), name='wo')(gated)
