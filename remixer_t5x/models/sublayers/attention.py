"""Multi-head attention (Vaswani et al. 2017, section 3.2) as in T5, and as in BERT and GPT-2.

    head_i = softmax(q_i k_i^T + bias) v_i,   q = X W_q,   k = M W_k,   v = M W_v,   Y = [head_1 | ... | head_h] W_o

X and Y are [batch, length, D], heads have width d. M is X in self-attention, and the encoder's output in
cross-attention. T5 has no biases and no factor 1/sqrt(d) on the logits: the factor is folded into the initializer of
W_q, which is equivalent under Adafactor and saves a pass over the logits. `ScaledAttention` has both.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.kernels.attention.formula import Bias
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.attend import attend_to_memory, attend_to_sequence
from remixer_t5x.models.layers.checks import require_memory
from remixer_t5x.models.layers.dense import Dense, split_heads
from remixer_t5x.models.layers.positions import RelativePositionBias

_IN_AXES, _OUT_AXES = (axes.EMBED, axes.JOINED_KV), (axes.JOINED_KV, axes.EMBED)
_BERT_INIT = nn.initializers.normal(stddev=0.02)


class _MultiHead(nn.Module):
    """The settings of all attention sublayers.

    Attributes:
        num_heads: number of heads, h.
        head_dim: width of a head's queries, keys and values, d.
        dropout_rate: dropout on the attention weights, with one mask for all queries.
    """

    num_heads: ranges.Count
    head_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    def _query(self, x: jax.Array) -> jax.Array:
        """T5's queries, [batch, length, heads, kv]."""
        init = nn.initializers.variance_scaling(1.0 / self.head_dim, 'fan_in', 'normal')
        query = Dense(self.num_heads * self.head_dim, _IN_AXES, kernel_init=init, name='query')(x)
        return split_heads(query, self.num_heads)


class SelfAttention(_MultiHead):
    """T5's self-attention; a token mixer.

    Attributes:
        position_bias: factory of a module (number of keys, ctx) -> bias, with separate parameters for this layer, as in
            umT5 (Chung et al. 2023); None for the bias that all layers of the stack share, as in T5.
    """

    position_bias: Callable[..., nn.Module] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        width = self.num_heads * self.head_dim
        query = self._query(x)
        key, value = (split_heads(Dense(width, _IN_AXES, name=name)(x), self.num_heads) for name in ('key', 'value'))
        bias = ctx.position_bias
        if self.position_bias is not None:
            bias = self.position_bias(name='position_bias')(ctx.num_keys, ctx)
        mixed = attend_to_sequence(self, query, key, value, ctx, bias, self.dropout_rate)
        return Dense(x.shape[-1], _OUT_AXES, name='out')(mixed.reshape(*x.shape[:-1], width))


class CrossAttention(_MultiHead):
    """T5's cross-attention: the tokens of a decoder attend to the encoder's output in `ctx.memory`.

    While decoding, the allocating call computes and caches the keys and values of the memory: once per sequence, for
    any number of beams.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        memory = require_memory(ctx, 'CrossAttention', 'SelfAttention')
        width, shape = self.num_heads * self.head_dim, x.shape
        if ctx.decode:
            x = cache.beams_as_queries(x, memory.hidden.shape[0])
        query = self._query(x)

        def project_memory(name: str) -> jax.Array:
            # Flatten the tokens: otherwise what the encoder and the decoder save of the memory for the backward pass
            # has the same shape, and the TPU compiler fills one buffer of zeros for both, at 2% of a step.
            tokens = memory.hidden.reshape(-1, memory.hidden.shape[-1])
            heads = Dense(width, _IN_AXES, name=name)(tokens)
            return heads.reshape(*memory.hidden.shape[:2], self.num_heads, self.head_dim)

        mixed = attend_to_memory(self, query, project_memory, memory, ctx, self.dropout_rate)
        return Dense(x.shape[-1], _OUT_AXES, name='out')(mixed.reshape(*shape[:-1], width))


class ScaledAttention(_MultiHead):
    """Self-attention of BERT and GPT-2, `softmax(q k^T / sqrt(d)) v`, with biases on all projections; a token mixer.

    It reads no position bias: these models add positions to the embeddings.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        return self._attend(x, ctx, None)

    def _attend(self, x: jax.Array, ctx: SequenceContext, bias: Bias, content: bool = True) -> jax.Array:
        width = self.num_heads * self.head_dim

        def project(name: str) -> jax.Array:
            projected = Dense(width, _IN_AXES, _BERT_INIT, use_bias=True, name=name)(x)
            return split_heads(projected, self.num_heads)

        value = project('value')
        query, key = (project('query'), project('key')) if content else (jnp.zeros_like(value),) * 2
        mixed = attend_to_sequence(self, query * self.head_dim**-0.5, key, value, ctx, bias, self.dropout_rate)
        mixed = mixed.reshape(*x.shape[:-1], width)
        return Dense(x.shape[-1], _OUT_AXES, _BERT_INIT, use_bias=True, name='out')(mixed)


class RelativeAttention(ScaledAttention):
    """`ScaledAttention` with a position bias for each layer and head, `softmax(q k^T / sqrt(d) + bias) v`.

    With `content=False` it is softmax(bias) v, whose weights depend on positions only: the baseline "rel pos - attn" of
    gMLP (Liu et al. 2021, table 3), a Random Synthesizer (Tay et al. 2020).

    Attributes:
        position_bias: factory of a module (number of keys, ctx) -> bias.
        content: whether queries and keys add to the bias.
    """

    position_bias: Callable[..., nn.Module] = RelativePositionBias
    content: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        bias = self.position_bias(num_heads=self.num_heads, name='position_bias')(ctx.num_keys, ctx)
        return self._attend(x, ctx, bias, self.content)
