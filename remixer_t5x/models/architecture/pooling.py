"""The head of a classifier: pools the features of a row's tokens, and gives a number for each label.

p = first token's features, or their mean over the row's tokens
y = dropout(tanh(p W_p + b_p)) W + b          (Devlin et al. 2019, as published: pooler and classifier)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.models.layers.dense import Dense

_INIT = nn.initializers.normal(stddev=0.02)
Pooling = Callable[[jax.Array, SequenceContext], jax.Array]


def first_token(hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
    """The first token's features, [batch, embed]; for vocabularies that begin each text with `[CLS]`."""
    return hidden[:, 0]


def mean_of_tokens(hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
    """The mean over the tokens of each row, [batch, embed], summed in float32; 0 for a row of padding."""
    is_token = ctx.is_token[..., None].astype(jnp.float32)
    total = jnp.sum(hidden.astype(jnp.float32) * is_token, axis=1)
    return (total / jnp.maximum(jnp.sum(is_token, axis=1), 1.0)).astype(hidden.dtype)


class ClassifierHead(nn.Module):
    """[batch, length, embed] -> [batch, outputs] float32.

    Attributes:
        outputs: number of labels, or 1 for a regression.
        pooling: `first_token` or `mean_of_tokens`.
        dropout_rate: dropout on the pooled features, before the last projection.
    """

    outputs: ranges.Count
    pooling: Pooling = mean_of_tokens
    dropout_rate: ranges.Rate = 0.0

    @nn.compact
    def __call__(self, hidden: jax.Array, ctx: SequenceContext) -> jax.Array:
        pooled = self.pooling(hidden, ctx)
        dense = Dense(pooled.shape[-1], (axes.EMBED, None), _INIT, use_bias=True, name='dense')
        pooled = jnp.tanh(dense(pooled))
        pooled = nn.Dropout(self.dropout_rate)(pooled, deterministic=ctx.deterministic)
        return Dense(self.outputs, (axes.EMBED, axes.OUTPUTS), _INIT, use_bias=True, name='output')(
            pooled.astype(jnp.float32)
        )
