"""HyperMixer (Mai et al. 2023, "HyperMixer: An MLP-based Low Cost Alternative to Transformers", section 2.3).

HyperMixer is an MLP along the tokens, with weights that hypernetworks generate from each token:

    W_1 = MLP_in(K + p)  [N, d']        W_2 = MLP_out(Q + p)  [M, d']
    Y   = LayerNorm(W_2 gelu(W_1^T V))                                   V: [N, D], Y: [M, D]

Each hypernetwork is an MLP with layer widths D, D and d' and a GELU; there are no other projections. Multiple heads are
from the authors' later paper ("HyperConformer"): D and d' are split into one group for each head. Tied weights
(`W_2 = W_1`) are the paper's default.

Choices that the paper leaves open: GELU is the tanh approximation; the length normalization scales only W_1; dropout is
applied to the hidden units of the generated MLP. In a decoder, which the paper does not cover, token t uses the hidden
units `gelu(sum_{j <= t} w_1[j] v[j]^T)`, and length normalization divides by the number of these tokens. Tokens of a
prefix use the sum over the whole prefix.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import EncoderMemory, SequenceContext, require_encoder_memory
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.running_token_mlp import apply_running_token_mlp
from remixer_t5x.kernels.running_token_mlp_loop import add_token_to_state, compute_token_output
from remixer_t5x.models.layers import cache, token_mlp
from remixer_t5x.models.layers.dense import GroupDense, create_param, dropout, split_groups
from remixer_t5x.models.layers.norms import LayerNorm, NormFactory
from remixer_t5x.models.layers.positions import EmbeddingFactory, compute_example_lengths


class GeneratedWeights(nn.Module):
    """Hypernetwork that generates the weights of each token from that token alone (section 2.3).

    Attributes:
        hidden_dim: total number of weights per token over all heads, d'.
    """

    hidden_dim: ranges.Count
    num_heads: ranges.Count
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, length, embed] to weights [batch, length, heads, hidden / heads]."""
        [groups] = split_groups(x, self.num_heads)
        hidden = nn.gelu(self._project_groups('wi', groups.shape[-1], (axes.EMBED, axes.MLP), groups), approximate=True)
        weights = self._project_groups('wo', self.hidden_dim // self.num_heads, (axes.MLP, axes.TOKEN_MLP), hidden)
        return jnp.moveaxis(weights, 0, 2)

    def _project_groups(self, name: str, features: int, names: tuple[str, str], groups: jax.Array) -> jax.Array:
        projected = GroupDense(features, (axes.HEADS, *names), name=name)((groups,))[0]
        if not self.use_bias:
            return projected
        shape = (self.num_heads, features)
        bias = create_param(self, f'{name}_bias', nn.initializers.zeros, (axes.HEADS, names[1]), shape)
        return projected + bias.astype(projected.dtype)[:, None, None]


class SharedWeightVector(nn.Module):
    """Learned weight vector that all tokens share (an ablation in appendix C.2 of the HyperMixer paper).

    Attributes:
        hidden_dim: total number of hidden units of the generated MLP over all heads, d'.
    """

    hidden_dim: ranges.Count
    num_heads: ranges.Count

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the weight vector for each token of x, [batch, length, heads, hidden / heads]."""
        init, shape = nn.initializers.normal(stddev=1.0), (self.num_heads, self.hidden_dim // self.num_heads)
        vector = create_param(self, 'vector', init, (axes.HEADS, axes.TOKEN_MLP), shape)
        return jnp.broadcast_to(vector.astype(x.dtype), (*x.shape[:2], *vector.shape))


class _HyperMixerBase(nn.Module):
    """Base class of `HyperMixer` and `HyperMixerCross`, with their settings and projections.

    Attributes:
        hidden_dim: total number of hidden units of the generated MLP over all heads, d'.
        num_heads: number of heads; must divide the model width and `hidden_dim`.
        weights: factory of a hypernetwork that maps [batch, length, embed] to [batch, length, heads, hidden / heads].
        token_information: factory of a module (width, ctx) -> p, which is added to the hypernetwork's input, or None.
        norm: factory of the output norm (the paper's "layer normalisation"), or None.
        length_scale: whether to divide W_1 by the number of mixed tokens (the paper's "length normalisation").
        dropout_rate: dropout on the hidden units of the generated MLP, with one mask per row.
    """

    hidden_dim: ranges.Count
    num_heads: ranges.Count = 1
    weights: Callable[..., Callable[[jax.Array], jax.Array]] = GeneratedWeights
    token_information: EmbeddingFactory | None = None
    norm: NormFactory | None = LayerNorm
    length_scale: bool = False
    dropout_rate: ranges.Rate = 0.0

    def _split_heads(self, x: jax.Array) -> jax.Array:
        """Reshapes [batch, length, embed] to [batch, length, heads, embed / heads]."""
        for setting, width in (('EMBED_DIM', x.shape[-1]), ('hidden_dim', self.hidden_dim)):
            if width % self.num_heads:
                raise UserError(
                    f'{type(self).__name__}.num_heads must divide {setting} = {width}, got {self.num_heads}; '
                    f'use a divisor of {width}'
                )
        return x.reshape(*x.shape[:-1], self.num_heads, -1)

    def _add_token_information(self, x: jax.Array, ctx: SequenceContext, name: str) -> jax.Array:
        if self.token_information is None:
            return x
        return x + self.token_information(name=name)(x.shape[-1], ctx).astype(x.dtype)

    def _generate_weights(self, x: jax.Array, name: str) -> jax.Array:
        return self.weights(hidden_dim=self.hidden_dim, num_heads=self.num_heads, name=name)(x)

    def _drop_hidden_units(self, w_out: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Applies dropout to the hidden units by zeroing their output weights in `w_out`."""
        units = w_out.reshape(*w_out.shape[:2], -1)
        return dropout(self.dropout_rate, units, deterministic=ctx.deterministic).reshape(w_out.shape)

    def _join_heads(self, mixed: jax.Array) -> jax.Array:
        y = mixed.reshape(*mixed.shape[:2], -1)
        return y if self.norm is None else self.norm(name='norm')(y)


class HyperMixer(_HyperMixerBase):
    """HyperMixer for self-mixing, `Y = LayerNorm(W_2 gelu(W_1^T X))`, with W_1 and W_2 generated from X.

    Attributes:
        tied: whether `W_2 = W_1`; if False, a second hypernetwork generates W_2.
    """

    tied: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        if not ctx.decode:
            x = _mask_padding(x, ctx)
        value = self._split_heads(x)
        inputs = self._add_token_information(x, ctx, 'token_information')
        w_in = self._generate_weights(inputs, 'w_in')
        w_out = self._drop_hidden_units(w_in if self.tied else self._generate_weights(inputs, 'w_out'), ctx)
        if ctx.causal:
            return self._join_heads(self._mix_causally(w_in, value, w_out, ctx))
        if self.length_scale:
            w_in = _divide_by_length(w_in, ctx)
        ids = ctx.segment_ids
        return self._join_heads(token_mlp.apply_token_mlp(w_in, value, w_out, ids, ids, packed=ctx.packed))

    def _mix_causally(self, w_in: jax.Array, value: jax.Array, w_out: jax.Array, ctx: SequenceContext) -> jax.Array:
        scale = 1.0 / (ctx.positions + 1.0) if self.length_scale else None
        if ctx.decode:
            state = self.variable('cache', 'hidden', _compute_initial_state, w_in, value, ctx)
            if ctx.step is not None:
                state.value = add_token_to_state(state.value, w_in[:, 0], value[:, 0])
                return compute_token_output(w_out[:, 0], state.value, None if scale is None else scale[:, 0])[:, None]
        mixed = apply_running_token_mlp(w_in, value, w_out, ctx.segment_ids, packed=ctx.packed, hidden_scale=scale)
        if ctx.prefix is None:
            return mixed
        prefix_ctx = dataclasses.replace(ctx, segment_ids=jnp.where(ctx.prefix, ctx.segment_ids, 0))
        scaled = _divide_by_length(w_in, prefix_ctx) if self.length_scale else w_in
        bidirectional = token_mlp.apply_token_mlp(
            scaled, value, w_out, prefix_ctx.segment_ids, ctx.segment_ids, packed=ctx.packed
        )
        return jnp.where(ctx.prefix[..., None, None], bidirectional, mixed)


class HyperMixerCross(_HyperMixerBase):
    """HyperMixer as a replacement for cross-attention, `Y = LayerNorm(W_2 gelu(W_1^T M))`.

    W_1 is generated from the encoder's output M, and W_2 from the decoder's features X. While decoding, the first call
    caches the hidden units, so the size of the cache does not depend on the length of M.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        memory = require_encoder_memory(ctx, 'HyperMixerCross', 'HyperMixer')
        shape = x.shape
        inputs = self._add_token_information(x, ctx, 'query_information')
        if ctx.decode:
            inputs = cache.reshape_beams_to_queries(inputs, memory.hidden.shape[0])
        w_out = self._drop_hidden_units(self._generate_weights(inputs, 'w_out'), ctx)
        if ctx.decode:

            def compute_units() -> jax.Array:
                return token_mlp.compute_hidden_units(*self._project_memory(memory), memory.context.is_token)

            mixed = token_mlp.project_hidden_units(w_out, self.variable('cache', 'memory_units', compute_units).value)
        else:
            w_in, value = self._project_memory(memory)
            ids = memory.context.segment_ids
            mixed = token_mlp.apply_token_mlp(w_in, value, w_out, ids, ctx.segment_ids, packed=ctx.packed)
        return self._join_heads(mixed).reshape(shape)

    def _project_memory(self, memory: EncoderMemory) -> tuple[jax.Array, jax.Array]:
        """Returns the weights W_1 and the values V of the encoder's output, [batch, memory_length, heads, ...] each."""
        hidden = _mask_padding(memory.hidden, memory.context)
        w_in = self._generate_weights(self._add_token_information(hidden, memory.context, 'key_information'), 'w_in')
        return _divide_by_length(w_in, memory.context) if self.length_scale else w_in, self._split_heads(hidden)


def _mask_padding(x: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Zeroes x at padding, because `token_mlp.apply_token_mlp` requires finite weights at padding."""
    return jnp.where(ctx.is_token[..., None], x, 0)


def _compute_initial_state(w_in: jax.Array, value: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Returns the state before the first decoding step: zeros, or the sum over a prompt without its last token."""
    if ctx.cache_slots is None:
        return jnp.zeros((*w_in.shape[:1], *w_in.shape[2:], value.shape[-1]), jnp.float32)
    return token_mlp.sum_outer_products(w_in, value, cache.mask_before_last_token(ctx))


def _divide_by_length(w_in: jax.Array, ctx: SequenceContext) -> jax.Array:
    return w_in * (1.0 / compute_example_lengths(ctx)).astype(w_in.dtype)[..., None, None]


class Identity(nn.Module):
    """Identity function instead of a token mixer (the ablation "feature mixing only" in appendix C.2 of the paper)."""

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        return x
