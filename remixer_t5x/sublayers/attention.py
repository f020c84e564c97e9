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
from remixer_t5x.layers.attention_mask import memory_mask, self_attention_mask
from remixer_t5x.layers.dense import Dense, split_heads
from remixer_t5x.layers.dot_product_attention import dot_product_attention
from remixer_t5x.layers.dropout import drop_value_rows
from remixer_t5x.layers.step_attention import attend_step, heads_first


def _query_init(head_dim: int) -> nn.initializers.Initializer:
    return nn.initializers.variance_scaling(1.0 / head_dim, 'fan_in', 'normal')


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
        key = split_heads(Dense(width, in_axes, name='key')(x), self.num_heads)
        value = split_heads(Dense(width, in_axes, name='value')(x), self.num_heads)
        query = split_heads(query, self.num_heads)
        if ctx.decode:
            mixed = self._attend_cached(query, key, value, ctx)
        else:
            value = drop_value_rows(self.dropout_rate, value, deterministic=ctx.deterministic)
            mask = self_attention_mask(ctx, key.shape[1])
            mixed = dot_product_attention(query, key, value, mask, ctx.position_bias)
        return Dense(x.shape[-1], in_axes[::-1], name='out')(mixed.reshape(*x.shape[:-1], width))

    def _attend_cached(self, query: jax.Array, key: jax.Array, value: jax.Array, ctx: SequenceContext) -> jax.Array:
        """Adds the token's key and value to those before it and attends to all of them."""
        key = cache.extend(self, 'cached_key', heads_first(key), ctx, axis=2)
        value = cache.extend(self, 'cached_value', heads_first(value), ctx, axis=2)
        mask = self_attention_mask(ctx, key.shape[2])
        value = drop_value_rows(self.dropout_rate, value, deterministic=ctx.deterministic)
        return attend_step(query, jnp.swapaxes(key, 2, 3), value, mask, ctx.position_bias)


class CrossAttention(nn.Module):
    """Decoder tokens attend to the encoder's output in `ctx.memory`.

    While decoding, keys and values of the memory are computed by the allocating call and kept: once per sequence,
    however many beams a sequence has.

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
        shape, memory = x.shape, ctx.memory
        if ctx.decode:
            x = cache.beams_as_queries(x, memory.hidden.shape[0])
        query = Dense(width, in_axes, kernel_init=_query_init(self.head_dim), name='query')(x)
        query = split_heads(query, self.num_heads)
        mask = memory_mask(ctx, memory.context)

        def of_memory(name: str) -> jax.Array:
            """Keys or values, [batch, memory_length, heads, kv]."""
            return split_heads(Dense(width, in_axes, name=name)(memory.hidden), self.num_heads)

        if ctx.decode:
            key = self.variable('cache', 'memory_key', lambda: jnp.swapaxes(heads_first(of_memory('key')), 2, 3)).value
            value = self.variable('cache', 'memory_value', lambda: heads_first(of_memory('value'))).value
            mixed = attend_step(
                query, key, drop_value_rows(self.dropout_rate, value, deterministic=ctx.deterministic), mask, None
            )
        else:
            value = drop_value_rows(self.dropout_rate, of_memory('value'), deterministic=ctx.deterministic)
            mixed = dot_product_attention(query, of_memory('key'), value, mask, None)
        return Dense(x.shape[-1], in_axes[::-1], name='out')(mixed.reshape(*shape[:-1], width))
