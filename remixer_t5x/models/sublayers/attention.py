"""Multi-head attention (Vaswani et al. 2017) as in T5: no biases, no 1/sqrt(d) on the logits.

The scale is folded into the query initialiser, which equals scaling under Adafactor and saves a pass over the logits.
"""

from collections.abc import Callable

import jax
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.models.layers import cache
from remixer_t5x.models.layers.attend import attend_to_memory, attend_to_own
from remixer_t5x.models.layers.checks import needed_memory
from remixer_t5x.models.layers.dense import Dense, split_heads


def _query_init(head_dim: int) -> nn.initializers.Initializer:
    return nn.initializers.variance_scaling(1.0 / head_dim, 'fan_in', 'normal')


class SelfAttention(nn.Module):
    """Tokens of one sequence attend to each other; a token mixer.

    Attributes:
        num_heads: number of heads.
        head_dim: width of a head's queries, keys and values.
        dropout_rate: dropout on the attention weights, one mask for all queries.
        position_bias: factory of a module (number of keys, ctx) -> bias, with parameters for this layer alone, as in
            umT5 (Chung et al. 2023); None for the bias that all layers of the stack share, as in T5.
    """

    num_heads: ranges.Count
    head_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0
    position_bias: Callable[..., nn.Module] | None = None

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        width = self.num_heads * self.head_dim
        in_axes = (axes.EMBED, axes.JOINED_KV)
        query = Dense(width, in_axes, kernel_init=_query_init(self.head_dim), name='query')(x)
        key = split_heads(Dense(width, in_axes, name='key')(x), self.num_heads)
        value = split_heads(Dense(width, in_axes, name='value')(x), self.num_heads)
        query = split_heads(query, self.num_heads)
        bias = ctx.position_bias
        if self.position_bias is not None:
            bias = self.position_bias(name='position_bias')(ctx.num_keys, ctx)
        mixed = attend_to_own(self, query, key, value, ctx, bias, self.dropout_rate)
        return Dense(x.shape[-1], in_axes[::-1], name='out')(mixed.reshape(*x.shape[:-1], width))


class CrossAttention(nn.Module):
    """Decoder tokens attend to the encoder's output in `ctx.memory`.

    While decoding, the allocating call computes keys and values of the memory and keeps them: once per sequence, for
    any number of beams.

    Attributes:
        num_heads: number of heads.
        head_dim: width of a head's queries, keys and values.
        dropout_rate: dropout on the attention weights, one mask for all queries.
    """

    num_heads: ranges.Count
    head_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        memory = needed_memory(ctx, 'CrossAttention', 'SelfAttention')
        width = self.num_heads * self.head_dim
        in_axes = (axes.EMBED, axes.JOINED_KV)
        shape = x.shape
        if ctx.decode:
            x = cache.beams_as_queries(x, memory.hidden.shape[0])
        query = Dense(width, in_axes, kernel_init=_query_init(self.head_dim), name='query')(x)
        query = split_heads(query, self.num_heads)

        def of_memory(name: str) -> jax.Array:
            # Flat tokens: what a decoder keeps of the memory for the backward pass then has another shape than what the
            # encoder keeps, or the TPU compiler fills one buffer of zeros for both, at 2% of a step.
            tokens = memory.hidden.reshape(-1, memory.hidden.shape[-1])
            heads = Dense(width, in_axes, name=name)(tokens)
            return heads.reshape(*memory.hidden.shape[:2], self.num_heads, self.head_dim)

        mixed = attend_to_memory(self, query, of_memory, memory, ctx, self.dropout_rate)
        return Dense(x.shape[-1], in_axes[::-1], name='out')(mixed.reshape(*shape[:-1], width))
