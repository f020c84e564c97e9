"""Remixer against the paper's equations in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models.sublayers import remixer
from tests.models.sublayers.formulas import gelu, softmax
from tests.models.sublayers.sublayer_inputs import context_of_lengths, random_params

D, F, LENGTH = 6, 10, 8
context = functools.partial(context_of_lengths, length=LENGTH)


def paper_block(x, w1, w2, h, w3, alpha, residual):
    """Computes section 2.1 for one unpadded example [length, D]."""
    hidden = gelu(x @ w1) * (x @ w2)
    mixed = softmax(h) @ hidden
    alpha = alpha(hidden) if callable(alpha) else alpha
    composed = mixed if alpha is None else alpha * (mixed * hidden) + (1 - alpha) * (hidden - mixed)
    if residual == 'hidden':
        return (composed + hidden) @ w3
    return composed @ w3 + (hidden if residual == 'identity' else 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


ALPHAS = {
    'NoComposition': lambda params: None,
    'FixedAlpha': lambda params: 0.25,
    'ScalarAlpha': lambda params: sigmoid(params['alpha']),
    'VectorAlpha': lambda params: sigmoid(params['alpha']),
    'GatedAlpha': lambda params: lambda hidden: sigmoid(hidden @ np.asarray(params['gating']['gate']['kernel'])),
}


@pytest.mark.parametrize(
    ('composition', 'residual', 'causal'),
    [
        ('NoComposition', 'no', False),
        ('FixedAlpha', 'hidden', True),
        ('ScalarAlpha', 'identity', False),
        ('ScalarAlpha', 'hidden', True),
        ('VectorAlpha', 'hidden', False),
        ('GatedAlpha', 'no', True),
    ],
)
def test_remixer_equals_the_papers_equations(composition, residual, causal):
    factory = getattr(remixer, composition)
    if composition == 'FixedAlpha':
        factory = functools.partial(factory, value=0.25)
    width = F if residual == 'identity' else D
    block = remixer.Remixer(F, LENGTH + 3, factory, getattr(remixer, f'{residual}_residual'))
    ctx = context([LENGTH, LENGTH], causal=causal)
    params = random_params(block, jnp.zeros((*ctx.segment_ids.shape, width)), ctx)
    x = np.random.default_rng(0).normal(size=(2, LENGTH, width))
    h = np.asarray(params['mixing']['logits'], np.float64)[:LENGTH, :LENGTH]
    if causal:
        h = np.where(np.tri(LENGTH, dtype=bool), h, -np.inf)
    kernels = [np.asarray(params[name]['kernel'], np.float64) for name in ('wi_0', 'wi_1', 'wo')]
    alpha = ALPHAS[composition](params.get('composition', {}))
    expected = [paper_block(row, kernels[0], kernels[1], h, kernels[2], alpha, residual) for row in x]
    actual = jax.jit(block.apply)({'params': params}, jnp.asarray(x, jnp.float32), ctx)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5 * np.max(np.abs(expected)))


@pytest.mark.parametrize('gate', [remixer.DenseGate, remixer.ElementwiseGate], ids=lambda gate: gate.__name__)
def test_gated_composition_is_between_composed_and_mixed(gate):
    """Table 5: "gating between X_c and X_s", with a vector for each token."""
    module = remixer.GatedComposition(gate, functools.partial(remixer.FixedAlpha, value=0.25))
    mixed, unmixed = np.random.default_rng(3).normal(size=(2, 1, LENGTH, F))
    variables = module.init(jax.random.key(0), jnp.asarray(mixed), jnp.asarray(unmixed))
    keys = jax.random.split(jax.random.key(1), 1)
    variables = jax.tree.map(lambda leaf: jax.random.normal(keys[0], leaf.shape), nn.unbox(variables))
    weights = jax.tree.leaves(variables)[0]
    gates = sigmoid(unmixed @ np.asarray(weights) if weights.ndim == 2 else unmixed * np.asarray(weights))
    composed = 0.25 * mixed * unmixed + 0.75 * (unmixed - mixed)
    expected = gates * composed + (1 - gates) * mixed
    actual = module.apply(variables, jnp.asarray(mixed, jnp.float32), jnp.asarray(unmixed, jnp.float32))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_bound_logits_keeps_small_logits_and_has_a_gradient_everywhere():
    small = np.linspace(-20, 20, 81, dtype=np.float32)
    np.testing.assert_array_equal(remixer.bound_logits(small), small)
    logits = jnp.linspace(-200, 200, 4001)
    actual = remixer.bound_logits(logits)
    assert np.all(np.diff(actual) > 0) and np.max(np.abs(actual)) < 30
    assert np.min(jax.vmap(jax.grad(remixer.bound_logits))(logits)) > 1e-3


def logits_up_to_200(seed, probability):
    """Returns normal logits H; with `probability`, those of a column are shifted by up to 200 up or down."""
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(LENGTH, LENGTH))
    return np.where(rng.random(LENGTH) < probability, h + rng.uniform(-200, 200, size=(LENGTH, LENGTH)), h).astype(
        np.float32
    )


def test_logits_of_masked_columns_do_not_change_tokens():
    """Columns of padding and of other examples are masked. The reference computes in float64."""
    mixing = remixer.LearnedMixing(LENGTH)
    mix = jax.jit(mixing.apply)

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(st.integers(0, 999), st.floats(0, 1), st.integers(1, LENGTH - 1), st.booleans(), st.booleans())
    def check(seed, probability, n, causal, packed):
        h = logits_up_to_200(seed, probability)
        hidden = np.random.default_rng(seed).normal(size=(1, LENGTH, F)).astype(np.float32)
        ctx = context([n], causal=causal)
        if packed:
            index = np.arange(LENGTH, dtype=np.int32)
            ids, positions = np.where(index < n, 1, 2), np.where(index < n, index, index - n)
            ctx = ctx.replace(segment_ids=jnp.asarray(ids[None], jnp.int32), positions=jnp.asarray(positions[None]))
            ctx = ctx.replace(packed=True)
        mixed = mix({'params': {'logits': jnp.asarray(h)}}, jnp.asarray(hidden), ctx)
        bounded = np.asarray(remixer.bound_logits(h), np.float64)
        for begin, end in [(0, n), (n, LENGTH)] if packed else [(0, n)]:
            logits = bounded[: end - begin, : end - begin]
            logits = np.where(np.tri(len(logits), dtype=bool), logits, -np.inf) if causal else logits
            expected = softmax(logits) @ hidden[0, begin:end]
            np.testing.assert_allclose(mixed[0, begin:end], expected, rtol=1e-4, atol=1e-4)

    check()


@pytest.mark.parametrize('causal', [True, False])
def test_mixing_on_a_gpu_equals_mixing_on_a_cpu(causal):
    mixing, ctx = remixer.LearnedMixing(LENGTH), context([LENGTH, 5], causal=causal)
    rng = np.random.default_rng(0)
    hidden, direction = (jnp.asarray(rng.normal(size=(2, LENGTH, F)), jnp.float32) for _ in range(2))
    direction = direction * ctx.is_token[..., None]
    logits = jnp.asarray(rng.normal(size=(LENGTH, LENGTH)), jnp.float32)

    def loss(logits, hidden):
        return jnp.sum(mixing.apply({'params': {'logits': logits}}, hidden, ctx) * direction)

    expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(logits, hidden)
    with compile_for_platform('gpu'):
        # A new function, because JAX caches the trace for the CPU.
        actual = jax.jit(jax.value_and_grad(lambda *args: loss(*args), argnums=(0, 1)))(logits, hidden)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=1e-5, atol=1e-5), actual, expected)


def test_mixing_dropout_is_shared_by_the_batch_and_keeps_the_mean():
    mixing = remixer.LearnedMixing(LENGTH, dropout_rate=0.2)
    ctx = context([LENGTH] * 2, deterministic=False)
    hidden = jnp.broadcast_to(jax.random.normal(jax.random.key(3), (1, LENGTH, F)), (2, LENGTH, F))
    variables = {'params': {'logits': jnp.zeros((LENGTH, LENGTH))}}

    def mix(key):
        return mixing.apply(variables, hidden, ctx, rngs={'dropout': key})

    draws = jax.jit(jax.vmap(mix))(jax.random.split(jax.random.key(4), 2000))
    np.testing.assert_array_equal(draws[:, 0], draws[:, 1])
    expected = mixing.apply(variables, hidden, ctx.replace(deterministic=True))
    assert not np.allclose(draws[0], expected)
    np.testing.assert_allclose(draws.mean(0), expected, atol=0.03)
