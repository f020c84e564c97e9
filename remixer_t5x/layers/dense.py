"""A dense layer without bias, computed on flattened tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

# Normal with variance 1 / fan_in: T5's initialiser for every projection.
FAN_IN_NORMAL = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')


class Dense(nn.Module):
    """`x @ kernel`, [..., in] -> [..., features], in x's dtype with a float32 kernel.

    Leading axes are flattened around the matmul: XLA:CPU otherwise turns the backward pass of a three-dimensional
    input into slow fused transposes, and on other devices the reshape is free.

    Attributes:
      features: width of the output.
      axes: logical names of the kernel's two axes.
      kernel_init: initialiser of the kernel.
    """

    features: int
    axes: tuple[str, str]
    kernel_init: nn.initializers.Initializer = FAN_IN_NORMAL

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param(
            'kernel',
            nn.with_logical_partitioning(self.kernel_init, self.axes),
            (x.shape[-1], self.features),
            jnp.float32,
        )
        tokens = x.reshape(-1, x.shape[-1])
        return (tokens @ kernel.astype(x.dtype)).reshape(*x.shape[:-1], self.features)
