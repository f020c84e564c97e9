"""MLP-Mixer against a PyTorch package, and its window form against the equation in NumPy."""

import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.kernels import window_mlp
from remixer_t5x.models.architecture import stack
from remixer_t5x.models.sublayers import mlp_mixer
from tests.models.sublayers.formulas import gelu
from tests.models.sublayers.sublayer_inputs import context_of_ids, random_params

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / 'golden' / 'mlp_mixer.npz')
LENGTH, HIDDEN = GOLDEN['wi'].shape
WIDTH = 5


def test_mixer_equals_a_pytorch_package():
    mixer = mlp_mixer.MLPMixer(HIDDEN, LENGTH)
    params = {name: jnp.asarray(GOLDEN[name]) for name in ('wi', 'wi_bias', 'wo', 'wo_bias')}
    ctx = context_of_ids(np.ones(GOLDEN['x'].shape[:2]))
    for packed in (False, True):
        actual = jax.jit(mixer.apply)({'params': params}, GOLDEN['x'], ctx.replace(packed=packed))
        np.testing.assert_allclose(actual, GOLDEN['mixed'], rtol=1e-4, atol=1e-4)


def window_reference(params, x, ids):
    """Computes the equation token by token, for [length, width] in float64."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    window = len(params['wi'])
    out = np.zeros_like(x)
    for t in range(len(x)):
        seen = np.zeros((window, x.shape[1]))
        for back in range(window):
            if t >= back and ids[t - back] == ids[t]:
                seen[window - 1 - back] = x[t - back]
        out[t] = params['wo'] @ gelu(params['wi'].T @ seen + params['wi_bias'][:, None]) + params['wo_bias']
    return out


@pytest.mark.parametrize('window', [1, 3, 40])
def test_window_form_equals_the_equation(window):
    """Tests windows shorter and longer than a chunk, and rows with one or several examples."""
    length = 2 * window_mlp.CHUNK + 3
    mixer = mlp_mixer.WindowMixer(4, window)
    x = np.random.default_rng(0).normal(size=(1, length, WIDTH))
    params = random_params(mixer, jnp.zeros(x.shape), context_of_ids(np.ones((1, length))))
    apply = jax.jit(lambda params, x, ctx: mixer.apply({'params': params}, x, ctx))

    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(st.sets(st.integers(1, length), min_size=1, max_size=4))
    def check(ends):
        ids = np.zeros((1, length), np.int32)
        for index, end in enumerate(sorted(ends, reverse=True)):
            ids[0, :end] = len(ends) - index
        for packed in {True, len(ends) > 1}:
            actual = apply(params, jnp.asarray(x, jnp.float32), context_of_ids(ids, packed=packed))[0]
            expected = window_reference(params, x[0], ids[0])
            is_token = ids[0] > 0
            np.testing.assert_allclose(actual[is_token], expected[is_token], rtol=1e-4, atol=1e-4)

    check()


def test_window_form_never_saves_all_hidden_units():
    """Tests a remat policy that saves the results of matrix products."""
    batch, length, width, hidden = 2, 512, 64, 32
    mixer = mlp_mixer.WindowMixer(hidden, 8)
    mix = nn.remat(mlp_mixer.WindowMixer, policy=stack.dots_remat)(hidden, 8)
    x, ctx = jnp.ones((batch, length, width)), context_of_ids(np.ones((batch, length)), causal=True)
    params = random_params(mixer, x, ctx)
    gradient = jax.jit(jax.grad(lambda params, x: jnp.sum(mix.apply({'params': params}, x, ctx))))
    temporary = gradient.lower(params, x).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 0.7 * batch * length * hidden * width * 4


@pytest.mark.parametrize(('kind', 'packed'), [('mixer', False), ('mixer', True), ('window', True)])
def test_dropout_drops_hidden_units_of_a_row_and_keeps_the_mean(kind, packed):
    rate, draws = 0.5, 1500
    mixer = mlp_mixer.MLPMixer(8, 4, rate) if kind == 'mixer' else mlp_mixer.WindowMixer(8, 3, rate)
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (1, 4, WIDTH)), (2, 4, WIDTH))
    ctx = context_of_ids(np.ones((2, 4)), packed=packed)
    params = random_params(mixer, x, ctx)
    expected = mixer.apply({'params': params}, x, ctx)

    def train(key):
        return mixer.apply({'params': params}, x, ctx.replace(deterministic=False), rngs={'dropout': key})

    drawn = jax.jit(jax.vmap(train))(jax.random.split(jax.random.key(1), draws))
    assert not np.allclose(drawn[0, 0], drawn[0, 1])
    spread = np.std(drawn, axis=0) / math.sqrt(draws)
    assert np.all(np.abs(np.mean(drawn, axis=0) - expected) < 5 * spread + 1e-3)
