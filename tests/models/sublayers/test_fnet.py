"""FNet against Hugging Face's, and the effect of padding and of the padded length."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models.sublayers import fnet
from tests.models.sublayers.sublayer_inputs import context_of_lengths

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / 'golden' / 'fnet.npz')
SIZES = sorted(name.removeprefix('x/') for name in GOLDEN if name.startswith('x/'))
LENGTH, WIDTH = 10, 6
context = functools.partial(context_of_lengths, length=LENGTH)


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('transform', [fnet.real_fourier_transform, fnet.real_fourier_by_matmul])
def test_transforms_equal_hugging_face(transform, size):
    expected = GOLDEN[f'mixed/{size}']
    np.testing.assert_allclose(transform(GOLDEN[f'x/{size}']), expected, atol=1e-5 * np.max(np.abs(expected)))


@pytest.mark.parametrize('devices', [1, 4])
def test_several_devices_transform_by_matmuls(devices, monkeypatch):
    monkeypatch.setattr(jax, 'device_count', lambda: devices)
    jaxpr = str(jax.make_jaxpr(lambda x: fnet.FNet().apply({}, x, context([4], length=4)))(jnp.ones((1, 4, 6))))
    assert ('fft' in jaxpr) == (devices == 1)


def test_a_tpu_transforms_by_matmuls_in_the_input_dtype():
    x = jax.random.normal(jax.random.key(0), (2, 64, 48))

    def mixed(x):
        return fnet.FNet().apply({}, x, context([64, 50], length=64))

    exact = mixed(x)
    with compile_for_platform('tpu'):
        jaxpr = str(jax.make_jaxpr(mixed)(x.astype(jnp.bfloat16)))
        low, full = mixed(x.astype(jnp.bfloat16)).astype(jnp.float32), mixed(x)
    assert 'fft' not in jaxpr and jaxpr.count('dot_general') == jaxpr.count('preferred_element_type=float32') == 4
    np.testing.assert_allclose(full, exact, atol=1e-5 * np.max(np.abs(exact)))
    # Inputs, DFT matrices, intermediate and final results are rounded to 8 bits, with errors of about 2 ** -9 each.
    error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 4 * 2**-9


def test_the_content_of_padding_does_not_change_the_output():
    apply = jax.jit(fnet.FNet().apply)

    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.integers(1, LENGTH), min_size=2, max_size=2), st.integers(0, 99))
    def check(lengths, seed):
        x, noise = jax.random.normal(jax.random.key(seed), (2, 2, LENGTH, WIDTH))
        ctx = context(lengths)
        noisy = jnp.where(ctx.is_token[..., None], x, noise * jnp.inf)
        np.testing.assert_array_equal(apply({}, noisy, ctx), apply({}, x, ctx))

    check()
