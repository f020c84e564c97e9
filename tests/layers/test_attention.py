"""Every way to compute attention equals the plain formula, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.layers.attention import choice, cudnn, meeting_blocks, step, tpu_plan
from remixer_t5x.layers.attention import formula as module
from remixer_t5x.layers.attention.bias import DistanceBias
from remixer_t5x.layers.attention.visibility import Visibility
from remixer_t5x.layers.compile_target import compiling_for

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


def padding(rows, length):
    return jnp.asarray(np.arange(length) < np.linspace(length, length // 2, rows)[:, None], jnp.int32)


def packed(rows, length):
    return jnp.asarray(np.sort(np.random.default_rng(1).integers(1, 4, (rows, length))), jnp.int32)


def odd_one(length):
    """Packed rows, whose last query is of an example without a key."""
    return packed(2, length).at[1, -1].set(9)


# Queries, keys, heads, width of a head, visibility and whether there is a bias. Rows of 200 tokens take two blocks of
# 128, the second of them not full. Two heads of 64 features fill the lanes of a register, three of 16 never do.
KERNEL_CASES = {
    'a decoder, packed, in two blocks': (200, 200, 2, 64, Visibility(packed(2, 200), packed(2, 200), True), True),
    # Blocks of 64 on a GPU; two rows of these see other blocks than their neighbours, and one query sees no key.
    'cross-attention, packed, in four blocks': (140, 200, 1, 16, Visibility(odd_one(140), packed(2, 200)), False),
    'an encoder in one block': (24, 24, 3, 16, Visibility(None, padding(2, 24)), True),
    'cross-attention to two blocks': (24, 200, 4, 64, Visibility(None, padding(2, 200)), False),
}


@pytest.mark.parametrize('platform, kernel', [('tpu', 'tpu_kernel'), ('gpu', 'gpu_kernel')])
@pytest.mark.parametrize('case', KERNEL_CASES)
def test_a_kernel_equals_the_formula_and_its_gradients(case, platform, kernel, monkeypatch):
    monkeypatch.setattr(tpu_plan, '_LONGEST_BLOCK', 128)
    queries, keys, heads, width, visibility, with_bias = KERNEL_CASES[case]
    rng = np.random.default_rng(0)
    lengths = (queries, keys, keys, queries)
    query, key, value, direction = (
        jnp.asarray(rng.normal(size=(2, length, heads, width)), jnp.float32) for length in lengths
    )
    by_distance = jnp.asarray(rng.normal(size=(heads, 2 * queries - 1)), jnp.float32)

    def value_and_gradients(implementation):
        def loss(query, key, value, by_distance):
            bias = DistanceBias(by_distance) if with_bias else None
            return jnp.sum(choice.attention(query, key, value, visibility, bias, implementation) * direction)

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(0.3 * query, key, value, by_distance)

    wanted = value_and_gradients('formula')
    with compiling_for(platform, interpret=True):
        actual = value_and_gradients(kernel)
    jax.tree.map(lambda a, w: np.testing.assert_allclose(a, w, rtol=2e-4, atol=2e-4), actual, wanted)


def test_a_kernel_that_cannot_compute_a_call_says_why():
    heads = jnp.ones((1, 4, 1, 8))
    everything = Visibility(None, jnp.ones((1, 4), jnp.int32))
    bias = jnp.zeros((1, 1, 4, 4))

    def refused(platform, implementation, reason, bias=None, visibility=everything, x=heads, chip=None):
        with compiling_for(platform, chip=chip), pytest.raises(UserError, match=reason):
            choice.attention(x, x, x, visibility, bias, implementation)

    refused('cpu', 'flash', "ATTENTION is 'flash'; type one of auto, formula, tpu_kernel, cudnn, gpu_kernel")
    refused('cpu', 'tpu_kernel', 'runs on another kind of device than cpu; type --gin.ATTENTION=auto')
    refused('gpu', 'tpu_kernel', 'runs on another kind of device than gpu')
    refused('tpu', 'tpu_kernel', 'takes a bias by distance', bias)
    refused('gpu', 'cudnn', 'computes in bfloat16 and not in float32')
    low = heads.astype(jnp.bfloat16)
    refused('tpu', 'tpu_kernel', 'multiplies bfloat16 on a TPU v4 or newer and not on a v3', x=low, chip='v3')
    several = Visibility(jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), jnp.int32))
    refused('gpu', 'cudnn', 'does not take packed rows', x=low, visibility=several)
    refused('gpu', 'cudnn', 'a multiple of 8 up to 128 features, got 4', x=low[..., :4])
    refused('gpu', 'cudnn', 'an even length for a bias, got 3 and 3', bias, x=low[:, :3])
    assert cudnn.refusal(low, low, low, everything, bias) is None
    refused('gpu', 'gpu_kernel', 'needs heads of 16, 32, 64 or 128 features, got 8')
    refused('gpu', 'gpu_kernel', 'takes a bias by distance', bias, x=jnp.ones((1, 4, 1, 16)))
    prefix = Visibility(None, jnp.ones((1, 4), jnp.int32), True, jnp.ones((1, 4), bool))
    for platform, implementation in (('gpu', 'cudnn'), ('gpu', 'gpu_kernel'), ('tpu', 'tpu_kernel')):
        refused(platform, implementation, 'does not read a prefix in both directions', x=low, visibility=prefix)


def test_auto_takes_the_formula_where_a_kernel_refuses():
    heads = jnp.ones((1, 4, 1, 8))
    everything = Visibility(None, jnp.ones((1, 4), jnp.int32))
    with compiling_for('gpu'):
        np.testing.assert_allclose(choice.attention(heads, heads, heads, everything), heads, rtol=1e-6)


def test_one_query_reads_a_cache_of_either_form(monkeypatch):
    """Also several: the beams of a sequence, which share its memory."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(B, n, H, D)), jnp.float32) for n in (2, K, K))
    mask = jnp.asarray(rng.random((B, 1, 2, K)) < 0.7).at[..., 0].set(True)
    bias = jnp.asarray(rng.normal(size=(1, H, 2, K)), jnp.float32)
    wanted = plain(query, key, value, mask, bias)
    for platform, dimensions in (('cpu', 4), ('tpu', 3)):
        monkeypatch.setattr(step, 'target_platform', lambda platform=platform: platform)
        cached_key, cached_value = step.cached_memory_key(key), step.cached(value)[0]
        assert cached_key.ndim == cached_value.ndim == dimensions
        mixed = step.attend_step(query, cached_key, cached_value, mask, bias)
        np.testing.assert_allclose(mixed, wanted, rtol=1e-5, atol=1e-6)


def test_a_packed_row_leaves_out_blocks_that_cannot_meet():
    """By the definition: between the first and the last block in which some query sees some key."""
    rng = np.random.default_rng(0)
    query_segments = np.sort(rng.integers(0, 6, (4, 300)))
    key_segments = np.sort(rng.integers(0, 6, (4, 300)))
    for causal in (True, False):
        query_segments[3, 7] = query_segments[3, 7] if causal else 9  # an example without a key
        keys = query_segments if causal else key_segments
        found = meeting_blocks.meetings(jnp.asarray(query_segments), jnp.asarray(keys), 64, causal)
        same = (query_segments[:, :, None] == keys[:, None]) & (np.tri(300, dtype=bool) | (not causal))
        same |= ~same.any(axis=2, keepdims=True) & (np.tri(300, dtype=bool) | (not causal))
        blocks = np.pad(same, ((0, 0), (0, 20), (0, 20))).reshape(4, 5, 64, 5, 64).any(axis=(2, 4))
        for seen, (first, end) in (
            (blocks, np.moveaxis(found.of_queries, 2, 0)),
            (np.swapaxes(blocks, 1, 2), np.moveaxis(found.of_keys, 2, 0)),
        ):
            np.testing.assert_array_equal(first, seen.argmax(axis=2))
            np.testing.assert_array_equal(end, 5 - seen[:, :, ::-1].argmax(axis=2))
        assert np.sum(found.of_queries[..., 1] - found.of_queries[..., 0]) < 0.75 * 4 * (15 if causal else 25)
