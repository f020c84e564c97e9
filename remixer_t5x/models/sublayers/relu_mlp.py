"""Feed-forward sublayer of the first T5 (Raffel et al. 2019): `Y = relu(X W_i) W_o`.

It is the Transformer's feed-forward (Vaswani et al. 2017, equation 2) without biases.
"""

import jax
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.layers.dropout import dropout


class ReluMLP(nn.Module):
    """Mixes features, one token at a time.

    Attributes:
        hidden_dim: number of hidden units, F.
        dropout_rate: dropout on the hidden units.
    """

    hidden_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        hidden = nn.relu(Dense(self.hidden_dim, (axes.EMBED, axes.MLP), name='wi')(x))
        hidden = dropout(self.dropout_rate, hidden, deterministic=ctx.deterministic)
        return Dense(x.shape[-1], (axes.MLP, axes.EMBED), name='wo')(hidden)
