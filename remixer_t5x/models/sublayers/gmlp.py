"""gMLP and aMLP (Liu et al. 2021, Pay Attention to MLPs, sections 2 and 4.3).

    Z = gelu(X U)                          U: [D, F]
    f(Z) = W LN(Z) + b                     W: [length, length], initially near 0; b: [length], initially 1
    Y = s(Z) V                             s(Z) = Z_1 * f(Z_2) and three other gates; V: [F/2 or F, D]

aMLP adds the output of a tiny attention with the same input X (figure 6) to f(Z):

    tiny_attn(X) = softmax(q k^T / sqrt(d)) v W_out,   q, k, v = X W_qkv,   d = 64 or 128

The block usually replaces both the attention and the feed-forward sublayer of a layer. Differences from the paper:
projections have no biases, as in T5; padding is zeroed before the multiplication by W; W and b are indexed by position
in the example, so packing does not change the output; in a decoder, W is lower triangular.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext, check_length, check_no_prefix
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import get_target_platform
from remixer_t5x.kernels.gelu import gelu, multiply_by_gelu, normalized_gelu
from remixer_t5x.kernels.reshaping import build_toeplitz_matrices, gather_by_positions
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.cached_attention import attend_to_sequence, build_sequence_visibility
from remixer_t5x.models.layers.dense import Dense, LazyProduct, create_param, dropout, matmul
from remixer_t5x.models.layers.norms import LayerNorm

# Function (name, features) -> X U, the input of the GELU.
ExpandFunction = Callable[[str, int], jax.Array]
# Function (X U) -> f(Z) or (X U_2, X U_1) -> Z_1 * f(Z_2). On GPUs, one kernel computes the second form.
SpatialProjection = Callable[..., jax.Array]
# Factory of modules that compute the spatial weights W for a number of tokens.
SpatialFactory = Callable[..., Callable[[int, SequenceContext], jax.Array]]

# cuBLAS loads 16 bytes at a time, so the contracted dimension of a bfloat16 matmul should be a multiple of 8.
_MATMUL_DEPTH_MULTIPLE = 8
# Initializes W near zero, so that f(Z) starts near 1, with Adafactor's minimum parameter scale.
SPATIAL_INIT = nn.initializers.normal(stddev=1e-3)


def linear_gate(expand: ExpandFunction, project: SpatialProjection, hidden_dim: ranges.Count) -> jax.Array:
    """Computes the gate `s(Z) = f(Z)`."""
    return project(expand('wi', hidden_dim))


def additive_gate(expand: ExpandFunction, project: SpatialProjection, hidden_dim: ranges.Count) -> jax.Array:
    """Computes the gate `s(Z) = Z + f(Z)`."""
    inputs = expand('wi', hidden_dim)
    return gelu(inputs) + project(inputs)


def multiplicative_gate(expand: ExpandFunction, project: SpatialProjection, hidden_dim: ranges.Count) -> jax.Array:
    """Computes the gate `s(Z) = Z * f(Z)`."""
    inputs = expand('wi', hidden_dim)
    return project(inputs, inputs)


def split_gate(expand: ExpandFunction, project: SpatialProjection, hidden_dim: ranges.Count) -> jax.Array:
    """Computes the paper's spatial gating unit `s(Z) = Z_1 * f(Z_2)`, where Z_1 and Z_2 are the halves of Z.

    U is stored as two matrices, because sharding F would place the halves of one matrix on different devices.
    """
    if hidden_dim % 2:
        raise UserError(f'GMLP.hidden_dim must be even for gmlp.split_gate, got {hidden_dim}; use {hidden_dim + 1}')
    return project(expand('wi_1', hidden_dim // 2), expand('wi_0', hidden_dim // 2))


class FreeSpatial(nn.Module):
    """Unconstrained spatial weights W: a learned [max_length, max_length] matrix."""

    max_length: ranges.Count

    @nn.compact
    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array:
        """Returns W, float32 [length, length], or [batch, length, length] for packed rows.

        In a decoding step, returns only one row of W, [1, length], or [batch, 1, length] if the steps of the batch
        differ. If `ctx` has a prefix, the caller must mask later tokens.
        """
        names, shape = (axes.POSITIONS_OUT, axes.POSITIONS_IN), (self.max_length, self.max_length)
        matrix = create_param(self, 'kernel', SPATIAL_INIT, names, shape)
        if ctx.step is not None:
            rows = jnp.take(matrix[:, :length], ctx.step, axis=0)
            return jnp.where(cache.visible_positions(length, ctx), rows, 0.0)[..., None, :]
        matrix = matrix[:length, :length]
        if ctx.causal and ctx.prefix is None:
            matrix = jnp.tril(matrix)
        return gather_by_positions(matrix, ctx.positions) if ctx.packed else matrix


class ToeplitzSpatial(nn.Module):
    """Toeplitz spatial weights, `W[i, j] = w[j - i]`, equivalent to a convolution along the tokens.

    The vector w has 2 * max_length - 1 parameters, or max_length in a causal decoder.
    """

    max_length: ranges.Count

    @nn.compact
    def __call__(self, length: int, ctx: SequenceContext) -> jax.Array:
        """Returns W, float32 [length, length], or one row of W in a decoding step, as `FreeSpatial` does."""
        check_no_prefix(ctx, 'ToeplitzSpatial')
        count = self.max_length if ctx.causal else 2 * self.max_length - 1
        values = create_param(self, 'kernel', SPATIAL_INIT, (axes.RELPOS_BUCKETS,), (count,))
        if ctx.causal:
            values = jnp.pad(values, (0, length - 1))
        center = self.max_length - 1  # index of the weight for distance 0
        if ctx.step is None:
            return build_toeplitz_matrices(values[None, center + 1 - length : center + length], length)[0]
        rows = jax.vmap(lambda step: jax.lax.dynamic_slice_in_dim(values, center - step, length))
        return rows(ctx.step)[:, None] if ctx.step.ndim else rows(ctx.step[None])


class TinyAttention(nn.Module):
    """aMLP's attention with one small head; maps [batch, length, D] to a `LazyProduct` [batch, length, features].

    Attributes:
        features: width of the output, which GMLP sets to the width of its gate.
        head_dim: width of the head, d; 64 or 128 in the paper.
    """

    features: int
    head_dim: ranges.Count = 64

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> LazyProduct:
        # The sharding rules must not shard the axis KV, because each logit would then require a sum across devices.
        kernels = [
            Dense(self.head_dim, (axes.EMBED, axes.KV), name=name).get_merged_kernel(x.shape[-1], x.dtype)
            for name in ('query', 'key', 'value')
        ]
        if get_target_platform() == 'gpu' and not ctx.decode:
            # With three matmuls, a GPU would write three gradients of x, each larger than the projections.
            projected = jnp.split(matmul(x, jnp.concatenate(kernels, axis=-1)), 3, axis=-1)
        else:
            projected = [matmul(x, kernel) for kernel in kernels]
        query, key, value = (array[:, :, None] for array in projected)
        mixed = attend_to_sequence(self, query * self.head_dim**-0.5, key, value, ctx)[:, :, 0]
        return LazyProduct(
            mixed, Dense(self.features, (axes.KV, axes.MLP), name='out').get_merged_kernel(self.head_dim, x.dtype)
        )


class SpatialMixing(nn.Module):
    """Spatial projection `f(Z) = W LN(Z) + b`, which mixes the tokens visible to each token."""

    max_length: ranges.Count
    weights: SpatialFactory

    @nn.compact
    def __call__(
        self, inputs: jax.Array, gated: jax.Array | None, added: LazyProduct | None, ctx: SequenceContext
    ) -> jax.Array:
        """Returns `f(Z) + added` for Z = gelu(inputs), multiplied by `gelu(gated)` if `gated` is not None.

        All arrays, including the result, are [batch, length, features].
        """
        norm = LayerNorm(axis=axes.MLP, name='norm')
        if get_target_platform() == 'gpu' and not ctx.decode:
            return self._mix_in_one_matmul(norm, inputs, gated, added, ctx)
        activated = gelu(inputs)
        units = norm(activated)
        if ctx.decode:
            units = cache.update_cache(self, 'cached_units', units, ctx)
        weights, bias = self._get_weights_and_bias(units.shape[1], ctx)
        if ctx.step is None and (ctx.packed or ctx.prefix is not None):
            weights = _mask_weights(weights, ctx)
        elif ctx.step is None:
            units = units * ctx.is_token[..., None].astype(units.dtype)
        equation = 'bqk,bkf->bqf' if weights.ndim == 3 else 'qk,bkf->bqf'
        mixed = jnp.einsum(equation, weights.astype(units.dtype), units) + bias.astype(units.dtype)
        mixed = mixed if added is None else mixed + added.compute_product()
        if gated is None:
            return mixed
        return (activated if gated is inputs else gelu(gated)) * mixed

    def _mix_in_one_matmul(
        self,
        norm: LayerNorm,
        inputs: jax.Array,
        gated: jax.Array | None,
        added: LazyProduct | None,
        ctx: SequenceContext,
    ) -> jax.Array:
        """Computes the result of `__call__` with a single matmul, because these matmuls are memory-bound on GPUs.

            W (scale Z + shift) + heads V + b = [W | heads | W 1] [scale Z ; V ; shift] + b

        Here Z is normalized, and `heads V` is the `LazyProduct` in `added`. The two matmuls of the backward pass also
        compute the gradients of W, heads, V and shift.
        """
        scale, shift = norm.get_scale_and_bias(inputs.shape[-1])
        weights, bias = self._get_weights_and_bias(inputs.shape[1], ctx)
        weights = _mask_weights(weights, ctx)
        columns, rows = [weights, jnp.sum(weights, axis=-1, keepdims=True)], [shift[None]]
        if added is not None:
            columns.append(added.left)
            rows.append(added.right)
        num_zeros = -sum(part.shape[-1] for part in columns) % _MATMUL_DEPTH_MULTIPLE
        columns.append(jnp.zeros((*inputs.shape[:2], num_zeros)))
        rows.append(jnp.zeros((num_zeros, inputs.shape[-1])))
        left = jnp.concatenate([part.astype(inputs.dtype) for part in columns], axis=-1)
        extra_rows = jnp.concatenate([part.astype(inputs.dtype) for part in rows])
        extra_rows = jnp.broadcast_to(extra_rows, (inputs.shape[0], *extra_rows.shape))
        right = jnp.concatenate([normalized_gelu(inputs, scale, norm.epsilon), extra_rows], axis=1)
        mixed = jnp.einsum('bqk,bkf->bqf', left, right)
        bias = bias if bias.ndim == 3 else bias[None]
        factor = mixed.astype(jnp.float32) + bias
        return factor.astype(inputs.dtype) if gated is None else multiply_by_gelu(gated, factor)

    def _get_weights_and_bias(self, length: int, ctx: SequenceContext) -> tuple[jax.Array, jax.Array]:
        """Returns W, and the bias b broadcastable to [batch, length, features]."""
        check_length('GMLP', self.max_length, length)
        weights = self.weights(max_length=self.max_length, name='weights')(length, ctx)
        bias = create_param(self, 'bias', nn.initializers.ones, (axes.POSITIONS_OUT,), (self.max_length,))
        if ctx.packed or ctx.step is not None:
            return weights, jnp.take(bias, ctx.positions)[..., None]
        return weights, bias[:length, None]


def _mask_weights(weights: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Returns W with the weights of masked token pairs set to zero, [batch, length, length].

    If the hidden units were masked instead, XLA:GPU would merge the batch into one matmul and transpose the units.
    """
    return jnp.where(build_sequence_visibility(ctx).build_mask()[:, 0], weights, 0.0)


class GMLP(nn.Module):
    """gMLP block, `Y = s(gelu(X U)) V`: an MLP whose hidden units are gated by a learned mix of all tokens.

    Attributes:
        hidden_dim: number of hidden units, F; `split_gate` divides them into two halves.
        max_length: maximum sequence length, the size of W and b; longer rows raise UserError.
        gate: gate function s, one of `split_gate`, `multiplicative_gate`, `additive_gate` and `linear_gate`.
        spatial: factory of the module that returns W: `ToeplitzSpatial`, as in the paper's language models, or
            `FreeSpatial`.
        attention: factory of a module (x, ctx) -> `LazyProduct`, whose product is added to f(Z):
            `TinyAttention` for aMLP, None for gMLP.
    """

    hidden_dim: ranges.Count
    max_length: ranges.Count
    gate: Callable[..., jax.Array] = split_gate
    spatial: SpatialFactory = ToeplitzSpatial
    attention: Callable[..., Callable[[jax.Array, SequenceContext], LazyProduct]] | None = None
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        def expand_features(name: str, features: int) -> jax.Array:
            return Dense(features, (axes.EMBED, axes.MLP), name=name)(x)

        def project_spatially(inputs: jax.Array, gated: jax.Array | None = None) -> jax.Array:
            added = None
            if self.attention is not None:
                added = self.attention(features=inputs.shape[-1], name='attention')(x, ctx)
            return SpatialMixing(self.max_length, self.spatial, name='mixing')(inputs, gated, added, ctx)

        gated = self.gate(expand_features, project_spatially, self.hidden_dim)
        gated = dropout(self.dropout_rate, gated, deterministic=ctx.deterministic)
        return Dense(x.shape[-1], (axes.MLP, axes.EMBED), name='wo')(gated)
