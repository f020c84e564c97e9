"""All implementations of attention against plain attention, with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.kernels import attention, attention_cudnn, attention_formula, attention_tpu_kernel, self_check
from remixer_t5x.kernels.attention_formula import DistanceBias, Visibility
from remixer_t5x.kernels.compile_target import compile_for_platform

B, Q, K, H, D = 3, 5, 7, 2, 4


def plain(query, key, value, mask, bias, softcap=None):
    key, value = (jnp.repeat(array, query.shape[2] // array.shape[2], axis=2) for array in (key, value))
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    logits = logits if bias is None else logits + bias
    weights = jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)
    return jnp.einsum('bhqk,bkhd->bqhd', weights, value)


@pytest.mark.parametrize('by_rows', [True, False])
@pytest.mark.parametrize(
    ('with_bias', 'mask_shape', 'group', 'softcap'),
    [(True, (B, 1, Q, K), 1, None), (False, (1, 1, Q, K), 3, 1.5), (True, (B, 1, 1, K), 3, 1.5)],
)
def test_the_formula_equals_plain_attention_with_gradients(monkeypatch, by_rows, with_bias, mask_shape, group, softcap):
    monkeypatch.setattr(attention_formula, 'targets_single_cpu', lambda: by_rows)
    rng = np.random.default_rng(0)
    sizes = (Q, group * H), (K, H), (K, H)
    query, key, value = (jnp.asarray(rng.normal(size=(B, *size, D)), jnp.float32) for size in sizes)
    bias = jnp.asarray(rng.normal(size=(1, group * H, Q, K)), jnp.float32) if with_bias else None
    mask = jnp.asarray(rng.random(mask_shape) < 0.7).at[..., 0].set(True)
    direction = jnp.asarray(rng.normal(size=query.shape), jnp.float32)

    def value_and_gradients(attention):
        def loss(query, key, value, bias):
            return jnp.sum(attention(query, key, value, mask, bias, softcap) * direction)

        arguments = (query, key, value, bias)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(*arguments)

    actual, expected = value_and_gradients(attention_formula.dot_product_attention), value_and_gradients(plain)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5), actual, expected)


def test_a_query_without_a_visible_key_stays_finite():
    query = key = value = jnp.ones((1, 2, 1, 4))
    mask = jnp.zeros((1, 1, 2, 2), bool)
    out, gradient = jax.value_and_grad(
        lambda q: attention_formula.dot_product_attention(q, key, value, mask, None).sum()
    )(query)
    assert np.isfinite(out) and np.all(np.isfinite(gradient))


def padding(rows, length):
    return jnp.asarray(np.arange(length) < np.linspace(length, length // 2, rows)[:, None], jnp.int32)


def packed(rows, length):
    return jnp.asarray(np.sort(np.random.default_rng(1).integers(1, 4, (rows, length))), jnp.int32)


# The last query of a row belongs to an example without a key.
WITHOUT_KEY = packed(2, 140).at[1, -1].set(9)

# Queries, keys, heads, width of a head, visibility, whether there is a bias, and the number of heads that share a key.
# Rows of 200 tokens have two blocks of 128, the second one partial. Two heads of 64 features fill a register's lanes.
KERNEL_CASES = {
    'a decoder, packed, in two blocks': (200, 200, 2, 64, Visibility(packed(2, 200), packed(2, 200), True), True),
    'cross-attention, packed': (140, 200, 1, 16, Visibility(WITHOUT_KEY, packed(2, 200)), False),
    'an encoder, packed, of odd length': (23, 23, 2, 16, Visibility(packed(2, 23), packed(2, 23)), True),
    'cross-attention to two blocks': (24, 200, 4, 64, Visibility(None, padding(2, 200)), False),
    'grouped queries': (24, 24, 6, 16, Visibility(None, padding(2, 24), True), True, 3),
    'a window in a decoder': (300, 300, 2, 64, Visibility(None, padding(2, 300), True, window=40), True),
    'a window in packed rows': (300, 300, 4, 16, Visibility(packed(2, 300), packed(2, 300), window=9), True, 2),
}


@pytest.mark.parametrize('platform', attention.KERNELS)
@pytest.mark.parametrize('case', KERNEL_CASES)
def test_a_kernel_equals_the_formula_with_gradients(case, platform, monkeypatch):
    """In float32; JAX's XLA attention with the same arguments replaces cuDNN."""
    monkeypatch.setattr(attention_tpu_kernel, '_MAX_BLOCK_LENGTH', 128)
    queries, keys, heads, width, visibility, with_bias, *group = KERNEL_CASES[case]
    rng = np.random.default_rng(0)
    query_size, key_size = (queries, heads), (keys, heads // sum(group or [1]))
    query, key, value, direction = (
        jnp.asarray(rng.normal(size=(2, *size, width)), jnp.float32)
        for size in (query_size, key_size, key_size, query_size)
    )
    by_distance = jnp.asarray(rng.normal(size=(heads, 2 * queries - 1)), jnp.float32)

    # Queries without a key have no loss, because the formula's additive mask passes their gradient through.
    has_key = jnp.any(visibility.build_mask(), axis=-1)[:, 0, :, None, None]
    direction *= has_key

    def value_and_gradients(attention):
        def loss(query, key, value, by_distance):
            mixed = attention(query, key, value, visibility, DistanceBias(by_distance) if with_bias else None)
            return jnp.sum(mixed * direction), mixed if visibility.window is None else mixed * has_key

        arguments = (0.3 * query, key, value, by_distance)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arguments)

    expected = value_and_gradients(functools.partial(attention.attention, implementation='formula'))
    with compile_for_platform(platform, interpret=True):
        actual = value_and_gradients(attention.KERNELS[platform][1].attend)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=2e-4, atol=2e-4), actual, expected)


@pytest.mark.parametrize(
    ('causal', 'window', 'keys'), [(False, None, 400), (True, None, 200), (True, 9, 9), (False, 9, 17)]
)
def test_the_cost_estimate_counts_visible_keys(causal, window, keys):
    plan = attention_tpu_kernel.AttentionPlan(400, 400, H, D, causal, window)
    operands = attention_tpu_kernel.AttentionOperands(*[jnp.zeros((B, 400, H * D))] * 3, None, None, None)
    options = attention_tpu_kernel._build_pallas_call_options(plan, operands, matmuls=2, reads=1)
    assert options['cost_estimate'].flops == 2 * 2 * B * H * 400 * keys * D


def test_segment_features_separate_the_segments_of_packed_rows():
    sets = attention_cudnn._build_segment_sets()[:600]
    products = jnp.einsum(
        'qf,kf->qk',
        sets.astype(jnp.bfloat16),
        (attention_cudnn._OTHER_SEGMENT_PENALTY * (sets - 1)).astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    assert np.all(np.diagonal(products) == 0)
    assert np.all(products[~np.eye(len(sets), dtype=bool)] <= -1e6)


def test_an_unsupported_call_raises_an_error_with_the_reason():
    heads = jnp.ones((1, 4, 1, 8))
    unpacked = Visibility(None, jnp.ones((1, 4), jnp.int32))
    bias = jnp.zeros((1, 1, 4, 4))

    def assert_rejected(platform, implementation, reason, bias=None, visibility=unpacked, x=heads):
        with compile_for_platform(platform), pytest.raises(UserError, match=reason):
            attention.attention(x, x, x, visibility, bias, implementation)

    assert_rejected('cpu', 'flash', "one of auto, formula, tpu_kernel, cudnn, got 'flash'")
    assert_rejected('cpu', 'tpu_kernel', 'does not run on a cpu; set ATTENTION = .auto')
    assert_rejected('tpu', 'tpu_kernel', 'requires a relative position bias', bias)
    assert_rejected('gpu', 'cudnn', 'requires bfloat16, got float32')
    low = heads.astype(jnp.bfloat16)
    packed_rows = Visibility(jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), jnp.int32))
    assert_rejected('gpu', 'cudnn', 'at most 112 for packed rows, got 120', x=jnp.tile(low, 15), visibility=packed_rows)
    for visibility in (unpacked, packed_rows):
        assert attention_cudnn.unsupported_reason(low, low, low, visibility, bias) is None
    prefix = Visibility(None, jnp.ones((1, 4), jnp.int32), True, jnp.ones((1, 4), bool))
    for platform, (name, _) in attention.KERNELS.items():
        assert_rejected(platform, name, 'does not support a bidirectional prefix', x=low, visibility=prefix)


def test_auto_falls_back_to_the_formula_and_logs_it_once(caplog):
    heads = jnp.ones((1, 4, 1, 8))
    unpacked = Visibility(None, jnp.ones((1, 4), jnp.int32))
    self_check.log_fallback.cache_clear()
    for _ in range(2):
        with compile_for_platform('gpu'):
            np.testing.assert_allclose(attention.attention(heads, heads, heads, unpacked), heads, rtol=1e-6)
    [record] = caplog.records
    assert 'cudnn' in record.message and 'float32' in record.message
