"""The chunked loss and its gradients against autodiff of its definition without chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.models import losses

B, D, V = 3, 5, 11


def loss_by_definition(hidden, kernel, targets, weights, z_loss, label_smoothing, softcap):
    """Returns the cross-entropy of smoothed targets minus their entropy, plus z_loss * log(Z)^2, as in T5X."""
    logits = hidden @ kernel
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    p = jax.nn.one_hot(targets, V) * (1 - label_smoothing)
    p = jnp.where(p > 0, p, label_smoothing / (V - 1))
    loss = jnp.sum(jax.scipy.special.xlogy(p, p) - p * (logits - log_z[..., None]), axis=-1)
    return jnp.sum((loss + z_loss * log_z**2) * weights)


def make_arrays(length, seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(B, length, D)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
    targets = jnp.asarray(rng.integers(1, V, (B, length)), jnp.int32)
    weights = jnp.asarray(rng.random((B, length)) < 0.8, jnp.float32)
    return hidden, kernel, targets, weights


OPTIONS = [(0.0, 0.0, None, 3), (1e-2, 0.1, None, 100), (0.0, 0.1, 2.0, 3), (1e-2, 0.0, 2.0, 100)]


@pytest.mark.parametrize(('z_loss', 'label_smoothing', 'softcap', 'chunk_length'), OPTIONS)
def test_loss_and_gradients_equal_the_definition(z_loss, label_smoothing, chunk_length, softcap):
    hidden, kernel, targets, weights = make_arrays(length=7)
    config = losses.CrossEntropy(z_loss, label_smoothing, chunk_length)

    def chunked(hidden, kernel):
        loss, sums = config(hidden, kernel, targets, weights, softcap)
        # `loss` and `sums['loss']` are equal and have the same gradient, so this is half of the loss.
        return 0.2 * loss + 0.3 * sums['loss']

    def reference(hidden, kernel):
        return loss_by_definition(hidden, kernel, targets, weights, z_loss, label_smoothing, softcap) * 0.5

    loss, gradients = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(hidden, kernel)
    expected_loss, expected_gradients = jax.jit(jax.value_and_grad(reference, argnums=(0, 1)))(hidden, kernel)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(chunked)(hidden, kernel), expected_loss, rtol=1e-5)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 9), st.integers(1, 10), st.integers(0, 99))
def test_sums_equal_numpy(length, chunk_length, seed):
    hidden, kernel, targets, weights = make_arrays(length, seed)
    config = losses.CrossEntropy(z_loss=0.1, chunk_length=chunk_length)
    # Everything outside of `jax.jit` is NumPy, because JAX compiles each operation for each shape.
    loss, sums = jax.jit(config)(hidden, kernel, targets, weights)
    scores, is_match = jax.jit(losses.score_and_match_targets, static_argnums=4)(
        hidden, kernel, targets, weights, chunk_length
    )
    hidden, kernel, targets, weights = map(np.asarray, (hidden, kernel, targets, weights))
    logits = hidden @ kernel
    log_z = np.log(np.sum(np.exp(logits), axis=-1))
    likelihood = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - log_z
    np.testing.assert_allclose(loss, sums['loss'])
    np.testing.assert_allclose(sums['weights'], weights.sum())
    np.testing.assert_allclose(sums['correct'], np.sum((logits.argmax(-1) == targets) * weights))
    np.testing.assert_allclose(sums['z_loss'], np.sum(0.1 * log_z**2 * weights), rtol=1e-5)
    np.testing.assert_allclose(scores, np.sum(likelihood * weights, axis=-1), atol=1e-4)
    np.testing.assert_array_equal(is_match, np.all((logits.argmax(-1) == targets) | (weights == 0), axis=-1))
    np.testing.assert_allclose(loss, np.sum(weights * (0.1 * log_z**2 - likelihood)), rtol=1e-4)


def test_logits_exist_for_one_chunk_only():
    hidden, kernel, targets, weights = make_arrays(length=12)
    config = losses.CrossEntropy(chunk_length=3)
    jaxpr = jax.make_jaxpr(jax.grad(lambda h, k: config(h, k, targets, weights)[0], argnums=(0, 1)))(hidden, kernel)
    assert f'f32[{B},3,{V}]' in str(jaxpr)
    assert f'[{B},12,{V}]' not in str(jaxpr) and f'[{B * 12},{V}]' not in str(jaxpr)
