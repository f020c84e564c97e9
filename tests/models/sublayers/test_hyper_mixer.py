"""HyperMixer against its authors' code, and other variants against the paper in NumPy."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.context import EncoderMemory
from remixer_t5x.models.layers.norms import LayerNorm
from remixer_t5x.models.layers.positions import SinusoidalPositions
from remixer_t5x.models.sublayers import hyper_mixer
from tests.models.sublayers.formulas import gelu
from tests.models.sublayers.sublayer_inputs import context_of_ids, random_params

GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'hyper_mixer.npz'
D, HIDDEN, LENGTH = 8, 12, 10
TORCH_NORM = functools.partial(LayerNorm, epsilon=1e-5)


def load_golden(case):
    with np.load(GOLDEN) as arrays:
        return {key.removeprefix(f'{case}/'): arrays[key] for key in arrays.files if key.startswith(f'{case}/')}


def parameters_of(arrays):
    """Returns the authors' parameters under our names; their kernels are [heads, out, in]."""
    params = {}
    for ours, theirs in (('w_in', 'hyper.w1_gen'), ('w_out', 'hyper.w2_gen')):
        params[ours] = {}
        for layer, name in (('wi', 'fc1'), ('wo', 'fc2')):
            params[ours][layer] = {'kernel': arrays[f'weights/{theirs}.{name}_weights'].swapaxes(1, 2)}
            if f'weights/{theirs}.{name}_biases' in arrays:
                params[ours][f'{layer}_bias'] = arrays[f'weights/{theirs}.{name}_biases']
    if 'weights/layer_norm.weight' in arrays:
        params['norm'] = {'scale': arrays['weights/layer_norm.weight'], 'bias': arrays['weights/layer_norm.bias']}
    return params


@pytest.mark.parametrize('case', ['one_head', 'heads', 'heads_bias_norm', 'cross'])
def test_hyper_mixer_equals_the_authors_code(case):
    arrays = load_golden(case)
    params = parameters_of(arrays)
    heads, _, per_head = params['w_in']['wo']['kernel'].shape
    options = {
        'weights': functools.partial(hyper_mixer.GeneratedWeights, use_bias='wi_bias' in params['w_in']),
        'norm': TORCH_NORM if 'norm' in params else None,
    }
    ctx = context_of_ids(arrays['is_query'])
    if case == 'cross':
        mixer = hyper_mixer.HyperMixerCross(heads * per_head, heads, **options)
        ctx = ctx.replace(memory=EncoderMemory(jnp.asarray(arrays['keys']), context_of_ids(arrays['is_key'])))
    else:
        mixer = hyper_mixer.HyperMixer(heads * per_head, heads, tied=False, **options)
    actual = np.asarray(jax.jit(mixer.apply)({'params': params}, arrays['queries'], ctx))
    is_token = arrays['is_query']
    scale = np.max(np.abs(arrays['mixed']))
    np.testing.assert_allclose(actual[is_token] / scale, arrays['mixed'][is_token] / scale, atol=2e-6)


def paper_mixer(x, positions, params, length_scale, causal):
    """Computes section 2.3 for one example [length, D], head by head; the causal form is ours."""

    def generate(name, head):
        kernels = [np.asarray(params[name][layer]['kernel'], np.float64)[head] for layer in ('wi', 'wo')]
        width = kernels[0].shape[0]
        return gelu((x + positions)[:, head * width : (head + 1) * width] @ kernels[0]) @ kernels[1]

    heads = params['w_in']['wi']['kernel'].shape[0]
    mixed = []
    for head, value in enumerate(np.split(x, heads, axis=1)):
        w_in, w_out = generate('w_in', head), generate('w_out' if 'w_out' in params else 'w_in', head)
        rows = []
        for t in range(len(x)):
            seen = t + 1 if causal else len(x)
            total = w_in[:seen].T @ value[:seen]
            rows.append(w_out[t] @ gelu(total / seen if length_scale else total))
        mixed.append(rows)
    return np.concatenate(mixed, axis=1)


@pytest.mark.parametrize(
    ('causal', 'tied', 'heads', 'length_scale'),
    [(False, False, 1, True), (False, True, 2, False), (True, False, 2, True), (True, True, 1, False)],
)
def test_hyper_mixer_equals_the_papers_equations(causal, tied, heads, length_scale):
    mixer = hyper_mixer.HyperMixer(
        HIDDEN, heads, tied=tied, norm=None, length_scale=length_scale, token_information=SinusoidalPositions
    )
    lengths = [LENGTH, 6]
    ctx = context_of_ids(np.arange(LENGTH) < np.array(lengths)[:, None], causal=causal)
    x = np.random.default_rng(0).normal(size=(2, LENGTH, D)).astype(np.float32)
    params = random_params(mixer, jnp.asarray(x), ctx, scale=0.5)
    actual = jax.jit(mixer.apply)({'params': params}, jnp.asarray(x), ctx)
    angles = np.arange(LENGTH)[:, None] / 10_000 ** (2 * np.arange(D // 2) / D)
    positions = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    for row, n in enumerate(lengths):
        expected = paper_mixer(x[row, :n].astype(np.float64), positions[:n], params, length_scale, causal)
        np.testing.assert_allclose(actual[row, :n], expected, atol=1e-5 * np.max(np.abs(expected)))


def test_shared_weight_vector_gives_every_token_the_same_output():
    """Without positions and generated weights, all tokens read the hidden units with the same weights."""
    mixer = hyper_mixer.HyperMixer(HIDDEN, 2, weights=hyper_mixer.SharedWeightVector, tied=False)
    ctx = context_of_ids(np.ones((1, LENGTH)))
    x = jax.random.normal(jax.random.key(2), (1, LENGTH, D))
    params = random_params(mixer, x, ctx, scale=0.5)
    assert params['w_in']['vector'].shape == (2, HIDDEN // 2)
    y = np.asarray(jax.jit(mixer.apply)({'params': params}, x, ctx))
    np.testing.assert_allclose(y[0], np.broadcast_to(y[0, :1], y[0].shape), rtol=1e-6)


def test_dropout_drops_entire_hidden_units():
    """With every unit but one dropped, each head's output is one unit's weights times its features: rank 1."""
    mixer = hyper_mixer.HyperMixer(16, norm=None, dropout_rate=0.9)
    ctx = context_of_ids(np.ones((1, LENGTH)), deterministic=False)
    x = jax.random.normal(jax.random.key(3), (1, LENGTH, D))
    params = random_params(mixer, x, ctx.replace(deterministic=True), scale=0.5)

    apply = jax.jit(lambda ctx, rngs: mixer.apply({'params': params}, x, ctx, rngs=rngs))

    def rank(ctx, **rngs):
        return np.linalg.matrix_rank(np.asarray(apply(ctx, rngs)[0]), tol=1e-4)

    ranks = {rank(ctx, dropout=jax.random.key(seed)) for seed in range(8)}
    assert min(ranks) <= 1 < max(ranks) < rank(ctx.replace(deterministic=True)) == D
