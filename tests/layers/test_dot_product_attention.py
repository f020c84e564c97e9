"""The hand-written backward pass equals autodiff of the plain formula, on both of its paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.layers import dot_product_attention as module

B, Q, K, H, D = 3, 5, 7, 2, 4


def plain(query, key, value, mask, bias):
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key)
    logits = logits if bias is None else logits + bias
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
    return jnp.einsum('bhqk,bkhd->bqhd', weights, value)


@pytest.mark.parametrize('by_rows', [True, False])
@pytest.mark.parametrize('with_bias', [True, False])
@pytest.mark.parametrize('mask_shape', [(1, 1, Q, K), (B, 1, 1, K), (B, 1, Q, K)])
def test_equals_plain_attention_and_its_gradients(monkeypatch, by_rows, with_bias, mask_shape):
    monkeypatch.setattr(module, 'on_single_cpu', lambda: by_rows)
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(B, n, H, D)), jnp.float32) for n in (Q, K, K))
    bias = jnp.asarray(rng.normal(size=(1, H, Q, K)), jnp.float32) if with_bias else None
    mask = jnp.asarray(rng.random(mask_shape) < 0.7).at[..., 0].set(True)
    direction = jnp.asarray(rng.normal(size=(B, Q, H, D)), jnp.float32)

    def value_and_gradients(attention):
        def loss(query, key, value, bias):
            return jnp.sum(attention(query, key, value, mask, bias) * direction)

        arguments = (query, key, value, bias)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments)

    actual, wanted = value_and_gradients(module.dot_product_attention), value_and_gradients(plain)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=1e-4, atol=1e-5), actual, wanted)


def test_a_query_that_may_see_nothing_stays_finite():
    query = key = value = jnp.ones((1, 2, 1, 4))
    mask = jnp.zeros((1, 1, 2, 2), bool)
    out, gradient = jax.value_and_grad(lambda q: module.dot_product_attention(q, key, value, mask, None).sum())(query)
    assert np.isfinite(out) and np.all(np.isfinite(gradient))
