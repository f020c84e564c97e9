"""TIM against algorithm 1 of the paper in NumPy, and which sublayers exchange information between mechanisms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.context import EncoderMemory, SequenceContext
from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models.architecture import layer
from remixer_t5x.models.layers.norms import GroupedRMSNorm
from remixer_t5x.models.sublayers import attention, tim
from tests.models.sublayers.formulas import gelu, softmax
from tests.models.sublayers.sublayer_inputs import random_params

D, F, HEADS, KV, LENGTH, MEMORY = 8, 12, 4, 3, 5, 4
BLOCKS = ('tim_attention', 'inter_mechanism_attention', 'tim_mlp')


def group_linear(h, kernels):
    """Multiplies each mechanism's features by its matrix, [tokens, n_s * in] -> [tokens, n_s * out]."""
    return np.concatenate([part @ w for part, w in zip(np.split(h, len(kernels), -1), kernels, strict=True)], -1)


def group_norm(h, scale, num_mechanisms):
    parts = np.split(h, num_mechanisms, -1)
    return np.concatenate([part / np.sqrt(np.mean(part**2, -1, keepdims=True) + 1e-6) for part in parts], -1) * scale


def multi_head(query, key, value, num_heads, bias=0.0):
    """Computes attention of [tokens, heads * kv] arrays, with the paper's scale."""
    heads = zip(*(np.split(array, num_heads, -1) for array in (query, key, value)), strict=True)
    bias = np.broadcast_to(bias, (num_heads, len(query), len(key)))
    return np.concatenate(
        [softmax(q @ k.T / np.sqrt(q.shape[-1]) + b) @ v for (q, k, v), b in zip(heads, bias, strict=True)], -1
    )


def step_1(h, p, num_mechanisms):
    """Returns the competition weights c, repeated over the features of each mechanism."""
    scores = group_linear(h, p['competition']['score']['kernel'])
    return np.repeat(softmax(scores), D // num_mechanisms, -1)


def project(h, p, kv):
    # Our query parameters include the scale of the logits, which the paper applies in the attention.
    query, key, value = (group_linear(h, p[name]['kernel']) for name in ('query', 'key', 'value'))
    return query * np.sqrt(kv), key, value


def step_2(h, p, bias):
    return group_linear(multi_head(*project(h, p, KV), HEADS, bias), p['out']['kernel'])


def step_3(h, p, num_mechanisms):
    # Each [n_s, tokens, heads * kv]: for one token, the mechanisms are the positions.
    q, k, v = (np.stack(np.split(array, num_mechanisms, -1)) for array in project(h, p, 32))
    mixed = [multi_head(q[:, t], k[:, t], v[:, t], num_heads=2).reshape(-1) for t in range(len(h))]
    return group_linear(np.stack(mixed), p['out']['kernel'])


def step_4(h, p):
    hidden = gelu(group_linear(h, p['wi_0']['kernel'])) * group_linear(h, p['wi_1']['kernel'])
    return group_linear(hidden, p['wo']['kernel'])


def algorithm_1(x, params, num_mechanisms, competes, bias, *, pre_norm):
    """Computes one encoder layer for one example [tokens, D], with the paper's post-norm or with pre-norm."""

    def first(h, p):
        return (step_1(h, p, num_mechanisms) if competes else 1.0) * step_2(h, p, bias)

    h = x
    steps = (first, lambda h, p: step_3(h, p, num_mechanisms), step_4)
    for name, step in zip(BLOCKS, steps, strict=True):
        norm = functools.partial(group_norm, scale=params[f'{name}_norm']['scale'], num_mechanisms=num_mechanisms)
        h = h + step(norm(h), params[name]) if pre_norm else norm(h + step(h, params[name]))
    return h


def context(length=LENGTH, **options):
    ids = jnp.ones((2, length), jnp.int32)
    return SequenceContext(ids, jnp.cumsum(ids, axis=1) - 1, **options)


def features(seed, length=LENGTH):
    return jax.random.normal(jax.random.key(seed), (2, length, D))


def relative_bias(length=LENGTH):
    return jax.random.normal(jax.random.key(7), (1, HEADS, length, length))


@pytest.mark.parametrize(
    ('num_mechanisms', 'competes', 'layout'),
    [(2, False, layer.PreNorm), (4, True, layer.PostNorm)],
)
def test_encoder_layer_equals_algorithm_1(num_mechanisms, competes, layout):
    competition = tim.Competition if competes else None
    sublayers = (
        functools.partial(tim.TimAttention, num_mechanisms, HEADS, KV, competition=competition),
        functools.partial(tim.InterMechanismAttention, num_mechanisms),
        functools.partial(tim.TimMLP, num_mechanisms, F),
    )
    block = layer.make_layer(sublayers, layout, norm=functools.partial(GroupedRMSNorm, num_mechanisms))
    x, ctx = features(0), context(position_bias=relative_bias())
    params = random_params(block, x, ctx)
    actual = jax.jit(block.apply)({'params': params}, x, ctx)
    exact = jax.tree.map(lambda array: np.asarray(array, np.float64), params)
    bias, rows = np.asarray(ctx.position_bias[0], np.float64), np.asarray(x, np.float64)
    expected = [
        algorithm_1(row, exact, num_mechanisms, competes, bias, pre_norm=layout is layer.PreNorm) for row in rows
    ]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-5 * np.max(np.abs(expected)))


def with_memory(ctx):
    return ctx.replace(memory=EncoderMemory(features(3, MEMORY), context(MEMORY)))


def test_cross_attention_with_one_mechanism_equals_the_plain_sublayer():
    grouped, plain = tim.TimCrossAttention(1, HEADS, KV), attention.CrossAttention(HEADS, KV)
    x, ctx = features(0), with_memory(context(position_bias=relative_bias(), causal=True))
    params = random_params(grouped, x, ctx)
    expected = jax.jit(plain.apply)({'params': jax.tree.map(lambda kernel: kernel[0], params)}, x, ctx)
    np.testing.assert_allclose(jax.jit(grouped.apply)({'params': params}, x, ctx), expected, rtol=1e-5, atol=1e-4)


def test_mechanisms_of_cross_attention_do_not_depend_on_each_other():
    module, x, ctx = tim.TimCrossAttention(2, HEADS, KV), features(0), with_memory(context())
    params = random_params(module, x, ctx)

    def first_mechanism(x, hidden):
        changed = ctx.replace(memory=ctx.memory.replace(hidden=hidden))
        return jnp.sum(jnp.sin(module.apply({'params': params}, x, changed)[..., : D // 2]))

    for gradient in jax.device_get(jax.jit(jax.grad(first_mechanism, argnums=(0, 1)))(x, ctx.memory.hidden)):
        assert not np.any(gradient[..., D // 2 :]) and np.all(gradient[..., : D // 2] != 0)


@pytest.mark.parametrize('platform', ['gpu', 'tpu'])
def test_outputs_on_accelerators_equal_those_on_a_cpu(platform):
    """A TPU uses one array per mechanism. Attention uses the formula; its kernels have separate tests."""
    attentions = tim.TimAttention, tim.TimCrossAttention
    sublayers = (
        *(functools.partial(module, 2, HEADS, KV) for module in attentions),
        functools.partial(tim.InterMechanismAttention, 2),
        functools.partial(tim.TimMLP, 2, F),
    )
    block = layer.make_layer(sublayers, norm=functools.partial(GroupedRMSNorm, 2))
    x, ctx = features(0), with_memory(context(position_bias=relative_bias(), causal=True, attention='formula'))
    params = jax.tree.map(lambda array: 0.3 * array, random_params(block, x, ctx))

    def value_and_gradients(params, x):
        return jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(block.apply(*args, ctx))), (0, 1))(params, x)

    expected = jax.jit(value_and_gradients)({'params': params}, x)
    with compile_for_platform(platform):
        actual = jax.jit(lambda *args: value_and_gradients(*args))({'params': params}, x)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=0, atol=1e-4 * np.max(np.abs(w))), actual, expected)


def test_initial_variance_depends_on_the_width_of_a_mechanism():
    width, head_dim = 512, 16
    module = tim.TimAttention(4, 4, head_dim)
    params = nn.unbox(jax.jit(module.init)(jax.random.key(0), jnp.zeros((2, 1, width)), context(1))['params'])
    expected = {'query': head_dim * width / 4, 'key': width / 4, 'value': width / 4, 'out': head_dim}
    for name, inverse_variance in expected.items():
        spread = np.std(params[name]['kernel']) * np.sqrt(inverse_variance)
        assert abs(spread - 1) < 0.1, (name, spread)
