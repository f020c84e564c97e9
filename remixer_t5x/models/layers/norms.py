"""RMSNorm (Zhang and Sennrich 2019), which T5 uses, and LayerNorm (Ba et al. 2016)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes, ranges
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import get_target_platform
from remixer_t5x.models.layers.dense import create_param

# Factory of modules that normalize an array.
NormFactory = Callable[..., Callable[[jax.Array], jax.Array]]


class RMSNorm(nn.Module):
    """RMS normalization over the last axis, `x / rms(x) * scale`, computed in float32.

    Attributes:
        zero_centered: whether to multiply by 1 + scale and initialize scale to 0, as in Gemma.
    """

    epsilon: ranges.Positive = 1e-6
    axis: str = axes.EMBED
    zero_centered: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.zero_centered else nn.initializers.ones
        scale = create_param(self, 'scale', init, (self.axis,), (x.shape[-1],))
        if self.zero_centered:
            scale = 1.0 + scale
        x32 = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        return (x32 * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)


class LayerNorm(nn.Module):
    """Layer normalization over the last axis, `(x - mean(x)) / std(x) * scale + bias`, computed in float32."""

    epsilon: ranges.Positive = 1e-6
    axis: str = axes.EMBED
    use_bias: bool = True

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centered), axis=-1, keepdims=True) + self.epsilon)
        scale, bias = self.get_scale_and_bias(x.shape[-1])
        return (centered * inverse * scale + bias).astype(x.dtype)

    @nn.compact
    def get_scale_and_bias(self, width: int) -> tuple[jax.Array, jax.Array]:
        """Returns the scale and the bias, float32 [width], for callers that implement the normalization themselves."""
        scale = create_param(self, 'scale', nn.initializers.ones, (self.axis,), (width,))
        if not self.use_bias:
            return scale, jnp.zeros_like(scale)
        return scale, create_param(self, 'bias', nn.initializers.zeros, (self.axis,), (width,))


class GroupedRMSNorm(nn.Module):
    """RMS normalization of feature groups of equal width, with a learned scale for each feature.

    Attributes:
        num_groups: number of groups; must divide the width of the input.
    """

    num_groups: ranges.Count
    epsilon: ranges.Positive = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        if width % self.num_groups:
            raise UserError(
                f'GroupedRMSNorm.num_groups must divide the input width of {width} features, got {self.num_groups}; '
                f'use a divisor of {width}'
            )
        scale = create_param(self, 'scale', nn.initializers.ones, (axes.EMBED,), (width,))
        x32 = x.astype(jnp.float32)
        inverse_rms = self._inverse_rms_without_reshape if get_target_platform() == 'tpu' else self._inverse_rms
        return (x32 * inverse_rms(jnp.square(x32)) * scale).astype(x.dtype)

    def _inverse_rms(self, squares: jax.Array) -> jax.Array:
        """Computes 1 / rms of each group, broadcast to its features."""
        groups = squares.reshape(*squares.shape[:-1], self.num_groups, -1)
        inverse = jax.lax.rsqrt(jnp.mean(groups, axis=-1, keepdims=True) + self.epsilon)
        return jnp.broadcast_to(inverse, groups.shape).reshape(squares.shape)

    def _inverse_rms_without_reshape(self, squares: jax.Array) -> jax.Array:
        """Computes 1 / rms without a reshape, which would require a copy on TPUs unless groups have 128 features."""
        width = squares.shape[-1] // self.num_groups
        group_of_feature = jnp.arange(squares.shape[-1]) // width
        inverse = jnp.zeros_like(squares)
        for group in range(self.num_groups):
            mean = jnp.sum(jnp.where(group_of_feature == group, squares, 0), axis=-1, keepdims=True) / width
            inverse = jnp.where(group_of_feature == group, jax.lax.rsqrt(mean + self.epsilon), inverse)
        return inverse
