"""The window mixer's kernels against its formula, with gradients, packed rows and dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.context import SequenceContext
from remixer_t5x.kernels import window_mlp, window_mlp_gpu, window_mlp_tpu
from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models.sublayers import mlp_mixer

KERNELS = {'gpu': window_mlp_gpu, 'tpu': window_mlp_tpu}
WIDTH, HIDDEN = 128, 3


def formula(wi, bias, out, tokens, ids):
    """Calls `mix_windows`, which the tests of the sublayer compare with its equation."""
    weights = window_mlp.TokenMLP(wi, bias, jnp.ones(HIDDEN), jnp.zeros(()))
    return window_mlp.mix_windows(weights, tokens, out, ids)


def value_and_gradients(mix, arrays, ids):
    def loss(arrays):
        mixed = mix(*arrays, ids)
        return jnp.sum(jnp.sin(mixed)), mixed

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)


def example_ids(length):
    """Returns the ids of rows with one or several examples."""
    ends = ([length - 3], [5, 6, length // 2, length - 1], [length])
    ids = np.zeros((len(ends), length), np.int32)
    for row, row_ends in enumerate(ends):
        for index, (start, end) in enumerate(zip([0, *row_ends], row_ends, strict=False)):
            ids[row, start:end] = index + 1
    return jnp.asarray(ids)


@pytest.mark.parametrize(('length', 'window', 'packed'), [(75, 33, True), (20, 4, False), (20, 26, True)])
@pytest.mark.parametrize('platform', KERNELS)
def test_equals_the_formula_with_gradients(platform, length, window, packed):
    rng = np.random.default_rng(length)
    ids = example_ids(length)
    shapes = (window, HIDDEN), (HIDDEN,), (len(ids), HIDDEN), (len(ids), length, WIDTH)
    *weights, tokens = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    arrays = [*weights, jnp.where((ids > 0)[..., None], tokens, 0)]
    ids = ids if packed else None
    expected = value_and_gradients(formula, arrays, ids)
    with compile_for_platform(platform, interpret=True):
        assert KERNELS[platform].unsupported_reason(arrays[0], arrays[-1]) is None
        actual = value_and_gradients(KERNELS[platform].apply_mlp, arrays, ids)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-3), actual, expected)


@pytest.mark.parametrize('platform', KERNELS)
def test_the_sublayer_uses_the_kernel_with_the_same_dropout(platform, monkeypatch):
    length = 40
    rng = np.random.default_rng(0)
    x, mixer = jnp.asarray(rng.normal(size=(3, length, WIDTH)), jnp.float32), mlp_mixer.WindowMixer(HIDDEN, 5, 0.5)
    positions = jnp.broadcast_to(jnp.arange(length), (3, length))
    ctx = SequenceContext(example_ids(length), positions, packed=True, deterministic=False, causal=True)
    params = mixer.init({'params': jax.random.key(0), 'dropout': jax.random.key(1)}, x, ctx)
    apply = functools.partial(mixer.apply, params, x, ctx, rngs={'dropout': jax.random.key(2)})
    expected = apply()
    monkeypatch.setattr(window_mlp, '_mix_by_formula', None)
    with compile_for_platform(platform, interpret=True):
        np.testing.assert_allclose(apply(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ('platform', 'window', 'width', 'words'),
    [
        ('gpu', 65, 32, 'at most 64 tokens'),
        ('tpu', 34, 128, 'at most 33 tokens'),
        ('tpu', 33, 96, 'a multiple of 128 features'),
    ],
)
def test_a_kernel_rejects_unsupported_calls(platform, window, width, words):
    wi, tokens = jnp.zeros((window, HIDDEN)), jnp.zeros((1, 8, width), jnp.bfloat16)
    assert words in KERNELS[platform].unsupported_reason(wi, tokens)
