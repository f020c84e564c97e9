"""FNet's token mixer (Lee-Thorp et al. 2021): `Y = Re(F_tokens(F_channels(X)))`, two Fourier transforms.

X and Y are [batch, length, D]; there are no parameters. Padding is set to zero before the transforms. A transform mixes
all positions of a row including padding, so outputs at tokens depend on the padded length, unlike those of all other
sublayers. Evaluate a model at the length that it was trained at (TASK_FEATURE_LENGTHS).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import target_platform


def fourier_real(x: jax.Array) -> jax.Array:
    """Returns the real part of the 2-D Fourier transform of float32 `x` [..., length, features], not normalized.

    The channels of a real input have a symmetric spectrum, `out[-l, -d] = out[l, d]`, so half of it is computed.
    """
    features = x.shape[-1]
    half = jnp.fft.fft(jnp.fft.rfft(x, axis=-1), axis=-2).real
    mirrored = half[..., 1 : (features + 1) // 2][..., ::-1]
    mirrored = jnp.roll(jnp.flip(mirrored, axis=-2), 1, axis=-2)
    return jnp.concatenate([half, mirrored], axis=-1)


def fourier_real_by_matmul(x: jax.Array) -> jax.Array:
    """Computes `fourier_real` as `C_L x C_D - S_L x S_D` with matrices of cosines and sines, float32.

    The operands have the dtype of x, and products are accumulated in float32.
    """
    cos_l, sin_l, cos_d, sin_d = (wave.astype(x.dtype) for size in x.shape[-2:] for wave in _waves(size))
    # By default a TPU multiplies float32 as bfloat16.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    by_cos, by_sin = (product('...ld,df->...lf', x, wave).astype(x.dtype) for wave in (cos_d, sin_d))
    return product('kl,...lf->...kf', cos_l, by_cos) - product('kl,...lf->...kf', sin_l, by_sin)


def _waves(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns cos and sin of 2 pi j k / size, [size, size] float32."""
    index = np.arange(size)
    # Reduced modulo the period first, because float32 sines of large angles are inaccurate.
    angles = np.outer(index, index) % size * (2 * np.pi / size)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class FNet(nn.Module):
    """`Y = Re(F_tokens(F_channels(X)))`; a token mixer for encoders whose rows have one example each.

    Raises UserError for packed rows, whose examples it would mix, and in decoders. It computes in float32; on a TPU the
    matmuls of a bfloat16 x have bfloat16 operands.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.causal:
            raise UserError(
                'FNet mixes each token with later ones, so it cannot be used in a decoder; '
                'type DECODER_MIXER = @attention.SelfAttention, @linear_attention.LinearAttention or '
                '@mlp_mixer.WindowMixer'
            )
        if ctx.packed:
            raise UserError(
                'FNet transforms whole rows, so it would mix the examples of a packed row; '
                'type PACK = False, or ENCODER_MIXER = @attention.SelfAttention or @linear_attention.LinearAttention'
            )
        tokens = jnp.where(ctx.is_token[..., None], x, 0)
        if target_platform() == 'tpu':
            # XLA:TPU's FFT moves complex numbers through memory, while matmuls of all rows fill the matrix unit.
            return fourier_real_by_matmul(tokens).astype(x.dtype)
        # On one device the FFT is several times faster (measured on a CPU), and on a GPU it moves fewer bytes. But the
        # partitioner does not split it: each of several devices would gather and transform the whole batch.
        transform = fourier_real if jax.device_count() == 1 else fourier_real_by_matmul
        return transform(tokens.astype(jnp.float32)).astype(x.dtype)
