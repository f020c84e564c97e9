"""Compares attention in a decoding step with plain attention."""

import jax
import jax.numpy as jnp
import numpy as np

from remixer_t5x.models.layers import cached_attention

B, K, H, D = 3, 7, 2, 4


def test_a_decoding_step_equals_plain_attention_in_both_cache_layouts(monkeypatch):
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(B, n, H, D)), jnp.float32) for n in (2, K, K))
    mask = jnp.asarray(rng.random((B, 1, 2, K)) < 0.7).at[..., 0].set(True)
    bias = jnp.asarray(rng.normal(size=(1, H, 2, K)), jnp.float32)
    logits = jnp.where(mask, jnp.einsum('bqhd,bkhd->bhqk', query, key) + bias, -jnp.inf)
    expected = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(logits, axis=-1), value)
    for platform, dimensions in (('cpu', 4), ('tpu', 3)):
        monkeypatch.setattr(cached_attention, 'get_target_platform', lambda platform=platform: platform)
        cached_key, cached_value = (cached_attention.to_cache_layout(array)[0] for array in (key, value))
        cached_key = cached_attention.transpose_keys(cached_key)
        assert cached_key.ndim == cached_value.ndim == dimensions
        mixed = cached_attention.attend_decoding_step(query, cached_key, cached_value, mask, bias)
        np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-6)
