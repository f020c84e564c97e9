"""FNet's token mixer (Lee-Thorp et al. 2021): `Y = Re(F_tokens(F_channels(X)))`, two Fourier transforms.

The layer has no parameters. Padding is zeroed before the transforms, but the transform over tokens still depends on the
padded length, so inference pads all rows to the full input length. Evaluate a model with the TASK_FEATURE_LENGTHS that
it was trained with.
"""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import get_target_platform


def real_fourier_transform(x: jax.Array) -> jax.Array:
    """Returns the real part of the unnormalized 2-D Fourier transform of float32 `x` [..., length, features].

    Only half of the channels are computed, because the result is symmetric for real inputs: `out[-l, -d] = out[l, d]`.
    """
    features = x.shape[-1]
    half = jnp.fft.fft(jnp.fft.rfft(x, axis=-1), axis=-2).real
    mirrored = half[..., 1 : (features + 1) // 2][..., ::-1]
    mirrored = jnp.roll(jnp.flip(mirrored, axis=-2), 1, axis=-2)
    return jnp.concatenate([half, mirrored], axis=-1)


def real_fourier_by_matmul(x: jax.Array) -> jax.Array:
    """Computes the same result as `real_fourier_transform` with matmuls, `C_L x C_D - S_L x S_D`, as float32.

    C_L and C_D are matrices of cosines, and S_L and S_D are matrices of sines, cast to the dtype of x.
    """
    cos_l, sin_l, cos_d, sin_d = (
        matrix.astype(x.dtype) for size in x.shape[-2:] for matrix in _build_fourier_matrices(size)
    )
    # TPUs multiply float32 arrays in bfloat16 by default.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    by_cos, by_sin = (product('...ld,df->...lf', x, matrix).astype(x.dtype) for matrix in (cos_d, sin_d))
    return product('kl,...lf->...kf', cos_l, by_cos) - product('kl,...lf->...kf', sin_l, by_sin)


def _build_fourier_matrices(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the matrices cos(2 pi j k / size) and sin(2 pi j k / size), [size, size] float32."""
    index = np.arange(size)
    # Reduce the angles modulo 2 pi, because the rounding error of an angle grows with its size.
    angles = np.outer(index, index) % size * (2 * np.pi / size)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class FNet(nn.Module):
    """FNet's token mixer for encoders with one example per row, `Y = Re(F_tokens(F_channels(X)))`.

    Raises UserError in decoders, and for packed rows, because the transform would mix their examples.
    """

    fixed_length: ClassVar[bool] = True

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.causal:
            raise UserError(
                'FNet mixes each token with later tokens, so it cannot be used in a decoder; '
                'set DECODER_MIXER = @attention.SelfAttention, @linear_attention.LinearAttention or '
                '@mlp_mixer.WindowMixer'
            )
        if ctx.packed:
            raise UserError(
                'FNet transforms whole rows, so it would mix the examples of a packed row; '
                'set PACK = False, or ENCODER_MIXER = @attention.SelfAttention or @linear_attention.LinearAttention'
            )
        tokens = jnp.where(ctx.is_token[..., None], x, 0)
        if get_target_platform() == 'tpu':
            # On TPUs, memory bandwidth limits the FFT, while the matmuls fully use the matrix unit.
            return real_fourier_by_matmul(tokens).astype(x.dtype)
        # On a single CPU device or GPU, the FFT is faster than the matmuls. XLA cannot partition an FFT, so each of
        # several devices would transform the whole batch.
        transform = real_fourier_transform if jax.device_count() == 1 else real_fourier_by_matmul
        return transform(tokens.astype(jnp.float32)).astype(x.dtype)
