"""gMLP and aMLP against recorded outputs of g-mlp-pytorch, and other variants against the paper in NumPy."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models.sublayers import gmlp
from tests.models.sublayers.formulas import gelu
from tests.models.sublayers.sublayer_inputs import context_of_ids, context_of_lengths, random_params

D, F, LENGTH, SPARE = 6, 10, 8, 3
GOLDEN = pathlib.Path(__file__).parents[2] / 'golden' / 'gmlp_g_mlp_pytorch.npz'
context = functools.partial(context_of_lengths, length=LENGTH)


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


PACKED = context_of_ids([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8], packed=True)


@pytest.mark.parametrize(
    ('gate', 'ctx', 'attention'),
    [
        ('split', context([LENGTH, 5]), gmlp.TinyAttention),
        ('additive', context([LENGTH, 5], causal=True), None),
        ('multiplicative', PACKED, None),
        ('linear', PACKED.replace(causal=True), gmlp.TinyAttention),
    ],
)
def test_outputs_on_a_gpu_equal_those_on_a_cpu(gate, ctx, attention):
    """Compares outputs and gradients; one scale of the norm is zero."""
    block = gmlp.GMLP(F, LENGTH + SPARE, getattr(gmlp, f'{gate}_gate'), gmlp.FreeSpatial, attention)
    params = random_params(block, jnp.zeros((*ctx.segment_ids.shape, D)), ctx)
    params['mixing']['norm']['scale'] = params['mixing']['norm']['scale'].at[0].set(0.0)
    x, weights = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, LENGTH, D)), jnp.float32)

    def loss(params, x):
        return jnp.sum(block.apply({'params': params}, x, ctx) * jnp.where(ctx.is_token[..., None], weights, 0))

    def compute():
        # A new function each time, because JAX caches the trace for the other device.
        return jax.jit(jax.value_and_grad(lambda *arguments: loss(*arguments), argnums=(0, 1)))(params, x)

    expected = compute()
    with compile_for_platform('gpu', interpret=True):
        actual = compute()

    def close(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.max(np.abs(expected)))

    jax.tree.map(close, actual, expected)


@pytest.mark.parametrize('kind', ['gmlp', 'amlp'])
@pytest.mark.parametrize('direction', ['bidirectional', 'causal'])
def test_equals_g_mlp_pytorch(kind, direction):
    with np.load(GOLDEN) as arrays:
        x = arrays['x']
        prefix = f'{direction}_{kind}/'
        theirs = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    upper, lower = np.split(theirs['proj_in.0.weight'], 2)
    params = {
        'wi_0': {'kernel': upper.T},
        'wi_1': {'kernel': lower.T},
        'wo': {'kernel': theirs['proj_out.weight'].T},
        'mixing': {
            'norm': {'scale': theirs['sgu.norm.weight'], 'bias': theirs['sgu.norm.bias']},
            'weights': {'kernel': theirs['sgu.weight'][0]},
            'bias': theirs['sgu.bias'][0],
        },
    }
    attention = None
    if kind == 'amlp':
        query, key, value = np.split(theirs['attn.to_qkv.weight'], 3)
        attention = functools.partial(gmlp.TinyAttention, head_dim=len(query))
        kernels = {'query': query, 'key': key, 'value': value, 'out': theirs['attn.to_out.weight']}
        params['attention'] = {name: {'kernel': kernel.T} for name, kernel in kernels.items()}
    block = gmlp.GMLP(2 * len(upper), x.shape[1], spatial=gmlp.FreeSpatial, attention=attention)
    ctx = context([x.shape[1]] * len(x), length=x.shape[1], causal=direction == 'causal')
    actual = jax.jit(block.apply)({'params': params}, x, ctx)
    np.testing.assert_allclose(actual, theirs['output'], rtol=1e-5, atol=1e-5)


GATES = {
    'linear': lambda z, f: f(z),
    'additive': lambda z, f: z + f(z),
    'multiplicative': lambda z, f: z * f(z),
    'split': lambda z, f: z[:, : F // 2] * f(z[:, F // 2 :]),
}


@pytest.mark.parametrize(
    ('gate', 'spatial', 'causal'),
    [
        ('split', 'FreeSpatial', False),
        ('split', 'FreeSpatial', True),
        ('split', 'ToeplitzSpatial', False),
        ('linear', 'ToeplitzSpatial', True),
        ('additive', 'ToeplitzSpatial', False),
        ('multiplicative', 'FreeSpatial', True),
    ],
)
def test_gmlp_equals_the_papers_equations(gate, spatial, causal):
    """Rows are shorter than max_length, so they use a corner of W, or its smaller distances."""
    max_length = LENGTH + SPARE
    block = gmlp.GMLP(F, max_length, getattr(gmlp, f'{gate}_gate'), getattr(gmlp, spatial))
    ctx = context([LENGTH], causal=causal)
    params = random_params(block, jnp.zeros((*ctx.segment_ids.shape, D)), ctx)
    x = np.random.default_rng(0).normal(size=(1, LENGTH, D))
    w = spatial_matrix(np.asarray(params['mixing']['weights']['kernel']), max_length, causal)[:LENGTH, :LENGTH]
    norm = params['mixing']['norm']

    def f(z):
        normed = layer_norm(z, np.asarray(norm['scale']), np.asarray(norm['bias']))
        return w @ normed + np.asarray(params['mixing']['bias'])[:LENGTH, None]

    u = np.concatenate([params[name]['kernel'] for name in ('wi', 'wi_0', 'wi_1') if name in params], axis=1)
    expected = GATES[gate](gelu(x[0] @ u), f) @ np.asarray(params['wo']['kernel'])
    actual = jax.jit(block.apply)({'params': params}, jnp.asarray(x, jnp.float32), ctx)[0]
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * np.max(np.abs(expected)))


def spatial_matrix(kernel, max_length, causal):
    """Returns the full W [max_length, max_length]."""
    if kernel.ndim == 1:
        distance = np.arange(max_length)[None, :] - np.arange(max_length)[:, None]
        kernel = kernel[np.minimum(distance + max_length - 1, len(kernel) - 1)]
    return np.tril(kernel) if causal else kernel


def test_gmlp_is_initialized_close_to_a_feed_forward_sublayer():
    """The initial gate is close to one, so outputs hardly depend on other tokens."""
    block = gmlp.GMLP(64, 128)
    x = jax.random.normal(jax.random.key(3), (1, 128, D))
    ctx = context([128], length=128)
    params = nn.unbox(jax.jit(block.init)(jax.random.key(0), x, ctx)['params'])
    expected = gelu(np.asarray(x @ params['wi_0']['kernel'])) @ np.asarray(params['wo']['kernel'])
    actual = np.asarray(jax.jit(block.apply)({'params': params}, x, ctx))
    assert np.std(actual - expected) < 0.02 * np.std(expected)


def test_unpacked_rows_have_no_array_of_batch_by_length_by_length():
    block = gmlp.GMLP(F, 64)
    ctx = context([64] * 7, length=64)
    params = random_params(block, jnp.zeros((*ctx.segment_ids.shape, D)), ctx)

    def loss(params, x, ctx):
        return jnp.sum(jnp.sin(block.apply({'params': params}, x, ctx)))

    x = jnp.ones((7, 64, D))
    assert '[7,64,64]' not in str(jax.make_jaxpr(jax.grad(loss))(params, x, ctx))
    assert '[7,64,64]' in str(jax.make_jaxpr(jax.grad(loss))(params, x, ctx.replace(packed=True)))
