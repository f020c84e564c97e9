"""Tiny attention of aMLP (Liu et al. 2021, Pay Attention to MLPs, figure 6): one small head for a gMLP's gate.

    tiny_attn(x) = softmax(q k^T / sqrt(d)) v W_out,   q, k, v = x W_qkv,   d = 64 or 128

No biases, as everywhere in T5.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.context import SequenceContext
from remixer_t5x.kernels.compile_target import target_platform
from remixer_t5x.models.layers.attend import attend_to_own
from remixer_t5x.models.layers.dense import Dense, Product, matmul


class TinyAttention(nn.Module):
    """[batch, length, embed] -> a product [batch, length, features]; give it as `GMLP.attention`.

    Attributes:
        features: width of the output; GMLP sets it to the width of its gate.
        head_dim: width of the only head, 64 or 128 in the paper.
    """

    features: int
    head_dim: ranges.Count = 64

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> Product:
        query, key, value = (array[:, :, None] for array in self._projections(x, ctx))
        mixed = attend_to_own(self, query * self.head_dim**-0.5, key, value, ctx)[:, :, 0]
        return Product(mixed, Dense(self.features, (None, axes.MLP), name='out').kernel(self.head_dim, x.dtype))

    def _projections(self, x: jax.Array, ctx: SequenceContext) -> list[jax.Array]:
        """Query, key and value, [batch, length, head_dim] each."""
        # The only head stays whole: split over devices, its logits would be sums across them.
        kernels = [
            Dense(self.head_dim, (axes.EMBED, None), name=name).kernel(x.shape[-1], x.dtype)
            for name in ('query', 'key', 'value')
        ]
        if target_platform() != 'gpu' or ctx.decode:
            return [matmul(x, kernel) for kernel in kernels]
        # One matmul: a GPU would write a gradient of x for each of three, and x is larger than all that they compute.
        return jnp.split(matmul(x, jnp.concatenate(kernels, axis=-1)), 3, axis=-1)
