"""Multi-head attention (Vaswani et al. 2017) as in T5: no biases, no 1/sqrt(d) on the logits.

The scale is folded into the query initialiser, which equals scaling under Adafactor and saves a pass over the logits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.layers import cache
from remixer_t5x.layers.dense import Dense
from remixer_t5x.layers.dot_product_attention import dot_product_attention


def _query_init(head_dim: int) -> nn.initializers.Initializer:
    return nn.initializers.variance_scaling(1.0 / head_dim, 'fan_in', 'normal')


def _split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """[batch, length, heads * kv] -> [batch, length, heads, kv]."""
    return x.reshape(*x.shape[:-1], num_heads, -1)


def self_attention_mask(ctx: SequenceContext, num_keys: int) -> jax.Array:
    """Which tokens of its own sequence a token may see, broadcastable to [batch, 1, q, k]."""
    if ctx.step is not None:
        return cache.visible(num_keys, ctx)[None, None, None]
    if ctx.packed:
        allowed = ctx.segment_ids[:, None, :, None] == ctx.segment_ids[:, None, None, :]
    else:
        allowed = ctx.is_token[:, None, None, :]
    return allowed & jnp.tri(num_keys, dtype=bool) if ctx.causal else allowed


def memory_mask(ctx: SequenceContext, memory_ctx: SequenceContext) -> jax.Array:
    """Which tokens of the encoder a decoder token may see, broadcastable to [batch, 1, q, k]."""
    if ctx.packed:
        return ctx.segment_ids[:, None, :, None] == memory_ctx.segment_ids[:, None, None, :]
    return memory_ctx.is_token[:, None, None, :]


def _drop_weights(rate: float, value: jax.Array, ctx: SequenceContext) -> jax.Array:
    """Dropout on attention weights with one mask for all queries, which drops whole value rows of a head."""
    if rate == 0.0 or ctx.deterministic:
        return value
    return nn.Dropout(rate, broadcast_dims=(-1,), deterministic=False)(value)


class SelfAttention(nn.Module):
    """Tokens of one sequence attend to each other; a token mixer.

    Attributes:
      num_heads: number of heads.
      head_dim: width of a head's queries, keys and values.
      dropout_rate: dropout on the attention weights, one mask for all queries.
    """

    num_heads: int
    head_dim: int
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        width = self.num_heads * self.head_dim
        in_axes = (axes.EMBED, axes.JOINED_KV)
        query = Dense(width, in_axes, kernel_init=_query_init(self.head_dim), name='query')(x)
        key = _split_heads(Dense(width, in_axes, name='key')(x), self.num_heads)
        value = _split_heads(Dense(width, in_axes, name='value')(x), self.num_heads)
        if ctx.decode:
            key = cache.extend(self, 'cached_key', key, ctx)
            value = cache.extend(self, 'cached_value', value, ctx)
        mask = self_attention_mask(ctx, key.shape[1])
        value = _drop_weights(self.dropout_rate, value, ctx)
        mixed = dot_product_attention(_split_heads(query, self.num_heads), key, value, mask, ctx.position_bias)
        return Dense(x.shape[-1], in_axes[::-1], name='out')(mixed.reshape(*x.shape[:-1], width))


class CrossAttention(nn.Module):
    """Decoder tokens attend to the encoder's output in `ctx.memory`.

    While decoding, keys and values of the memory are computed by the allocating call and kept: once per sequence.

    Attributes:
      num_heads: number of heads.
      head_dim: width of a head's queries, keys and values.
      dropout_rate: dropout on the attention weights, one mask for all queries.
    """

    num_heads: int
    head_dim: int
    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.memory is None:
            raise UserError(
                'CrossAttention needs the output of an encoder: use it in DECODER_SUBLAYERS, or SelfAttention here'
            )
        width = self.num_heads * self.head_dim
        in_axes = (axes.EMBED, axes.JOINED_KV)
        query = Dense(width, in_axes, kernel_init=_query_init(self.head_dim), name='query')(x)
        key = self._of_memory('key', ctx.memory.hidden, ctx)
        value = self._of_memory('value', ctx.memory.hidden, ctx)
        value = _drop_weights(self.dropout_rate, value, ctx)
        mask = memory_mask(ctx, ctx.memory.context)
        mixed = dot_product_attention(_split_heads(query, self.num_heads), key, value, mask, None)
        return Dense(x.shape[-1], in_axes[::-1], name='out')(mixed.reshape(*x.shape[:-1], width))

    def _of_memory(self, name: str, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Keys or values of the memory, [batch, memory_length, heads, kv]."""
        project = Dense(self.num_heads * self.head_dim, (axes.EMBED, axes.JOINED_KV), name=name)
        if not ctx.decode:
            return _split_heads(project(hidden), self.num_heads)
        return self.variable('cache', f'memory_{name}', lambda: _split_heads(project(hidden), self.num_heads)).value
