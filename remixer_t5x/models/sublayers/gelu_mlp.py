"""Feed-forward sublayer of BERT and GPT-2: `Y = gelu(X W_i + b_i) W_o + b_o` (Vaswani et al. 2017 with GELU).

BERT (Devlin et al. 2019) has the exact GELU, GPT-2 (Radford et al. 2019) the tanh form.
"""

import jax
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.models.layers.dense import Dense

INIT = nn.initializers.normal(stddev=0.02)


class GeluMLP(nn.Module):
    """Mixes features, one token at a time.

    Attributes:
        hidden_dim: number of hidden units, F.
        approximate: the tanh form of GELU, as in GPT-2; False is the exact one, as in BERT.
    """

    hidden_dim: ranges.Count
    approximate: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        hidden = Dense(self.hidden_dim, (axes.EMBED, axes.MLP), INIT, use_bias=True, name='wi')(x)
        hidden = nn.gelu(hidden, approximate=self.approximate)
        return Dense(x.shape[-1], (axes.MLP, axes.EMBED), INIT, use_bias=True, name='wo')(hidden)
