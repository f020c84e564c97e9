"""Root-mean-square normalisation (Zhang and Sennrich 2019), as T5 uses it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes


class RMSNorm(nn.Module):
    """`x / rms(x) * scale` over the last axis; no mean, no bias; statistics in float32 whatever x's dtype."""

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param(
            'scale',
            nn.with_logical_partitioning(nn.initializers.ones, (axes.EMBED,)),
            (x.shape[-1],),
            jnp.float32,
        )
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)
