"""FNet's token mixer (Lee-Thorp et al. 2021): `Y = Re(F_tokens(F_channels(X)))`, two Fourier transforms, no parameters.

Features at padding are set to zero before the transforms. A transform mixes all positions of a row, padding included:
the outputs at real tokens depend on the length of the row, not only on its tokens. No other sublayer does this. A
padded row therefore keeps its outputs at one padded length only (that of TASK_FEATURE_LENGTHS), and must be evaluated
at the length that it was trained at.
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
    """Real part of the two-dimensional Fourier transform of float32 `x` [..., length, features], not normalised.

    The channels of a real input have a symmetric spectrum: `out[-l, -d] = out[l, d]`, so half of it is computed.
    """
    features = x.shape[-1]
    half = jnp.fft.fft(jnp.fft.rfft(x, axis=-1), axis=-2).real
    mirrored = half[..., 1 : (features + 1) // 2][..., ::-1]
    mirrored = jnp.roll(jnp.flip(mirrored, axis=-2), 1, axis=-2)
    return jnp.concatenate([half, mirrored], axis=-1)


def fourier_real_by_matmul(x: jax.Array) -> jax.Array:
    """What `fourier_real` computes, as `C_L x C_D - S_L x S_D` with matrices of cosines and sines, float32.

    The operands have the dtype of x; products are added up in float32.
    """
    cos_l, sin_l, cos_d, sin_d = (wave.astype(x.dtype) for size in x.shape[-2:] for wave in _waves(size))
    # Without this, a TPU multiplies float32 as bfloat16.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    by_cos, by_sin = (product('...ld,df->...lf', x, wave).astype(x.dtype) for wave in (cos_d, sin_d))
    return product('kl,...lf->...kf', cos_l, by_cos) - product('kl,...lf->...kf', sin_l, by_sin)


def _waves(size: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of 2 pi j k / size, [size, size] float32."""
    index = np.arange(size)
    # Reduced before the division, as float32 waves of a large angle would be wrong.
    angles = np.outer(index, index) % size * (2 * np.pi / size)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class FNet(nn.Module):
    """Mixes the tokens of a row by a fixed transform; an encoder's token mixer for rows of one example.

    Padding leaves the result unchanged at one padded length only; see the module's docstring. Refuses packed rows,
    whose examples it would mix, and decoders. Computes in float32 for any dtype of x; on a TPU, matmuls of bfloat16 x
    have operands of that dtype and add up in float32.
    """

    @nn.compact
    def __call__(self, x: jax.Array, ctx: SequenceContext) -> jax.Array:
        if ctx.causal:
            raise UserError(
                'FNet mixes each token with those after it and cannot be used in a decoder: '
                'give DECODER_MIXER = @attention.SelfAttention, @linear_attention.LinearAttention or '
                '@mlp_mixer.WindowMixer'
            )
        if ctx.packed:
            raise UserError(
                'FNet transforms whole rows and would mix the examples of a packed row: '
                'give PACK = False, or ENCODER_MIXER = @attention.SelfAttention or @linear_attention.LinearAttention'
            )
        tokens = jnp.where(ctx.is_token[..., None], x, 0)
        return _transform(tokens).astype(x.dtype)


def _transform(x: jax.Array) -> jax.Array:
    if target_platform() == 'tpu':
        # XLA:TPU's FFT moves complex numbers through memory; matmuls of all rows fill the matrix unit. XLA:GPU's FFT
        # moves fewer bytes than the matmuls do (docs/benchmarks.md).
        return fourier_real_by_matmul(x)
    # The FFT is several times faster on one device (measured on a CPU), but the partitioner does not split it: with
    # several devices each would gather and transform the whole batch. Matmuls stay where their rows are.
    x = x.astype(jnp.float32)
    return fourier_real(x) if jax.device_count() == 1 else fourier_real_by_matmul(x)
