"""Defines the network of HyperMixer's toy task (appendix B.4): two convolutions, one token mixer, two convolutions.

    x -> conv -> relu -> conv -> relu -> y -> y + mixer(norm(y)) -> conv -> relu -> conv -> row of heights

The convolutions have a kernel of five tokens and zero padding. The variant `none` replaces the mixer by a fifth
convolution. The paper does not specify the width, or whether the mixer has a residual connection and a norm; we use a
pre-norm layer (`models/architecture/layer.py`). Only MLP-Mixer has position-specific weights.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.context import SequenceContext, make_sequence_context
from remixer_t5x.models.architecture.layer import PreNorm
from remixer_t5x.models.layers.dense import Dense
from remixer_t5x.models.sublayers.attention import SelfAttention
from remixer_t5x.models.sublayers.hyper_mixer import HyperMixer
from remixer_t5x.models.sublayers.mlp_mixer import MLPMixer

KERNEL = 5
# The network represents heights, which are at most 25, as multiples of this unit.
HEIGHT_UNIT = 10.0


class Convolution(nn.Module):
    """A convolution over five tokens with bias, [batch, length, in] -> [batch, length, features].

    One matmul over five shifted copies of the input is faster than XLA's convolution on a CPU.
    """

    features: int

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext | None = None) -> jax.Array:
        side = KERNEL // 2
        padded = jnp.pad(x, ((0, 0), (side, side), (0, 0)))
        seen = jnp.concatenate([padded[:, shift : shift + x.shape[1]] for shift in range(KERNEL)], axis=-1)
        bias = self.param('bias', nn.initializers.zeros, (self.features,))
        return Dense(self.features, (axes.EMBED, axes.MLP), name='kernel')(seen) + bias


def build_mixer_factories(width: int, hidden: int, length: int) -> dict[str, Callable[..., nn.Module]]:
    """Returns factories of the four token mixers that the paper compares."""
    return {
        'none': functools.partial(Convolution, width),
        'mlp_mixer': functools.partial(MLPMixer, hidden_dim=hidden, max_length=length),
        'attention': functools.partial(SelfAttention, num_heads=1, head_dim=width),
        'hyper_mixer': functools.partial(HyperMixer, hidden_dim=hidden),
    }


class ShapesNetwork(nn.Module):
    """The network of the toy task, which maps heights [batch, length] to heights [batch, length].

    Attributes:
        mixer: factory of a module `(x, ctx) -> y`.
        width: number of channels.
    """

    mixer: Callable[..., nn.Module]
    width: int

    @nn.compact
    def __call__(self, rows: jax.Array) -> jax.Array:
        ctx = make_sequence_context(jnp.ones(rows.shape, jnp.int32))
        x = rows[..., None] / HEIGHT_UNIT
        for _ in range(2):
            x = nn.relu(Convolution(self.width)(x))
        x = PreNorm([self.mixer])(x, ctx)
        x = nn.relu(Convolution(self.width)(x))
        return HEIGHT_UNIT * Convolution(1)(x)[..., 0]
