"""Feed-forward sublayers: MLPs applied to each token separately.

    GatedMLP  Y = (f(X W_0) * X W_1) W_o           f: gelu in T5.1.1 (GEGLU), silu in UL2 (SwiGLU; Shazeer 2020)
    ReluMLP   Y = relu(X W_i) W_o                  the original T5 (Raffel et al. 2019)
    GeluMLP   Y = gelu(X W_i + b_i) W_o + b_o      BERT (Devlin et al. 2019) and GPT-2 (Radford et al. 2019)

Shapes: X and Y are [batch, length, D]; W_0, W_1 and W_i are [D, F]; W_o is [F, D].
"""

import functools
from collections.abc import Callable

import jax
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.dense import Dense, dropout

_IN_AXES, _OUT_AXES = (axes.EMBED, axes.MLP), (axes.MLP, axes.EMBED)
_BERT_INIT = nn.initializers.normal(stddev=0.02)
# Activation functions for `GatedMLP`; 'gelu' is the tanh approximation, as in T5 and Gemma.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    'gelu': functools.partial(nn.gelu, approximate=True),
    'gelu_exact': functools.partial(nn.gelu, approximate=False),
    'silu': nn.silu,
    'relu': nn.relu,
    'linear': lambda x: x,
}


class GatedMLP(nn.Module):
    """Gated feed-forward sublayer, `Y = (f(X W_0) * X W_1) W_o`.

    Attributes:
        hidden_dim: number of hidden units, F.
    """

    hidden_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0
    activation: str = 'gelu'

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UserError(f'ACTIVATION must be one of {", ".join(ACTIVATIONS)}, got {self.activation!r}')
        super().__post_init__()

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        gate = ACTIVATIONS[self.activation](Dense(self.hidden_dim, _IN_AXES, name='wi_0')(x))
        hidden = gate * Dense(self.hidden_dim, _IN_AXES, name='wi_1')(x)
        hidden = dropout(self.dropout_rate, hidden, deterministic=ctx.deterministic)
        return Dense(x.shape[-1], _OUT_AXES, name='wo')(hidden)


class ReluMLP(nn.Module):
    """Feed-forward sublayer of the original Transformer, but without biases, `Y = relu(X W_i) W_o`.

    Attributes:
        hidden_dim: number of hidden units, F.
    """

    hidden_dim: ranges.Count
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        hidden = nn.relu(Dense(self.hidden_dim, _IN_AXES, name='wi')(x))
        hidden = dropout(self.dropout_rate, hidden, deterministic=ctx.deterministic)
        return Dense(x.shape[-1], _OUT_AXES, name='wo')(hidden)


class GeluMLP(nn.Module):
    """Feed-forward sublayer of BERT and GPT-2, `Y = gelu(X W_i + b_i) W_o + b_o`, with BERT's initializer.

    Attributes:
        approximate: whether to use the tanh approximation of GELU, as in GPT-2; BERT uses the exact GELU.
    """

    hidden_dim: ranges.Count
    approximate: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        hidden = Dense(self.hidden_dim, _IN_AXES, _BERT_INIT, use_bias=True, name='wi')(x)
        hidden = nn.gelu(hidden, approximate=self.approximate)
        return Dense(x.shape[-1], _OUT_AXES, _BERT_INIT, use_bias=True, name='wo')(hidden)
