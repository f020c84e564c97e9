"""Multi-head attention as first published (Vaswani et al. 2017, section 3.2), and as BERT and GPT-2 have it.

    head_i = softmax(q_i k_i^T / sqrt(d)) v_i,   q = x W_q + b_q, k and v alike,   y = [head_1 | ... | head_h] W_o + b_o

It differs from T5's attention (`attention.py`) in the biases, in the scale, which is not folded into an initialiser,
and in the initialiser, a normal with deviation 0.02 (Devlin et al. 2019). It does not read a position bias: such models
add positions to the embeddings.
"""

import jax
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.models.layers.attend import attend_to_own
from remixer_t5x.models.layers.dense import Dense, split_heads

INIT = nn.initializers.normal(stddev=0.02)


class ScaledAttention(nn.Module):
    """Tokens of one sequence attend to each other, with biases and a scale of `head_dim ** -0.5`; a token mixer.

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
        width = self.num_heads * self.head_dim

        def project(name: str) -> jax.Array:
            return Dense(width, (axes.EMBED, axes.JOINED_KV), INIT, use_bias=True, name=name)(x)

        query, key, value = (split_heads(project(name), self.num_heads) for name in ('query', 'key', 'value'))
        mixed = attend_to_own(self, query * self.head_dim**-0.5, key, value, ctx, None, self.dropout_rate)
        mixed = mixed.reshape(*x.shape[:-1], width)
        return Dense(x.shape[-1], (axes.JOINED_KV, axes.EMBED), INIT, use_bias=True, name='out')(mixed)
