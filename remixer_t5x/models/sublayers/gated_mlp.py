"""Gated feed-forward sublayer of T5.1.1: `Y = (gelu(X W_0) * X W_1) W_o` (Shazeer 2020, GEGLU)."""

import jax
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.layers.dropout import dropout


class GatedMLP(nn.Module):
    """Mixes features, one token at a time.

    Attributes:
        hidden_dim: number of hidden units, F.
        dropout_rate: dropout on the hidden units.
    """

    hidden_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        gate = nn.gelu(Dense(self.hidden_dim, (axes.EMBED, axes.MLP), name='wi_0')(x), approximate=True)
        hidden = gate * Dense(self.hidden_dim, (axes.EMBED, axes.MLP), name='wi_1')(x)
        hidden = dropout(self.dropout_rate, hidden, deterministic=ctx.deterministic)
        return Dense(x.shape[-1], (axes.MLP, axes.EMBED), name='wo')(hidden)
