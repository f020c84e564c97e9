"""Options of attention against their formulas; `tests/interop/test_families.py` compares complete models."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.positions import RotaryEmbedding
from remixer_t5x.models.sublayers.attention import CrossAttention, RelativeAttention, SelfAttention
from remixer_t5x.models.sublayers.feed_forward import ACTIVATIONS, GatedMLP
from remixer_t5x.testing.sublayer_fixture import make_segment_arrays
from tests.models.sublayers.formulas import softmax
from tests.models.sublayers.sublayer_inputs import context_of_lengths, random_params
from tests.support import references

BATCH, LENGTH, EMBED, HEADS, WIDTH = 2, 9, 12, 4, 6
OPTIONS = {
    'grouped queries': {'num_kv_heads': 2},
    'multi-query': {'num_kv_heads': 1},
    'QK norm': {'qk_norm': True},
    'softcap': {'logit_softcap': 1.5},
    'sliding window': {'sliding_window': 3},
    'RoPE': {'rotary': functools.partial(RotaryEmbedding, theta=100.0)},
    'scaled RoPE of some features': {'rotary': functools.partial(RotaryEmbedding, fraction=0.67, scaling_factor=2.0)},
}
OPTIONS['all'] = functools.reduce(dict.__or__, OPTIONS.values())


def rotate(x, positions, theta=1e4, fraction=1.0, scaling_factor=1.0):
    """Applies RoPE to [length, width], as a product of complex numbers."""
    half = int(x.shape[-1] * fraction) // 2
    rotation = np.exp(1j * np.outer(positions / scaling_factor, theta ** -(np.arange(half) / half)))
    rotated = (x[:, :half] + 1j * x[:, half : 2 * half]) * rotation
    return np.concatenate([rotated.real, rotated.imag, x[:, 2 * half :]], axis=1)


def attend(params, x, positions, visible, options):
    """Computes attention for one example [length, embed], head by head."""
    heads = []
    for head in range(HEADS):
        shared = head * options.get('num_kv_heads', HEADS) // HEADS
        columns = {'query': head, 'key': shared, 'value': shared}
        q, k, v = (x @ params[name]['kernel'][:, i * WIDTH : (i + 1) * WIDTH] for name, i in columns.items())
        if options.get('qk_norm'):
            q, k = (y / np.sqrt(np.mean(y**2, axis=1, keepdims=True) + 1e-6) for y in (q, k))
            q, k = q * params['query_norm']['scale'] / np.sqrt(WIDTH), k * params['key_norm']['scale']
        if 'rotary' in options:
            q, k = (rotate(y, positions, **options['rotary'].keywords) for y in (q, k))
        logits, cap = q @ k.T, options.get('logit_softcap')
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        weights = np.where(visible, np.exp(logits), 0)
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ v)
    return np.concatenate(heads, axis=1) @ params['out']['kernel']


@pytest.mark.parametrize(
    ('option', 'causal'),
    [*zip(OPTIONS, itertools.cycle([False, True])), ('sliding window', True), ('all', False)],
)
def test_options_equal_the_formula_on_packed_rows(option, causal):
    options = OPTIONS[option]
    rng = np.random.default_rng(0)
    ids, positions = make_segment_arrays([[9], [5, 4]], LENGTH)
    ctx = SequenceContext(ids, positions, causal=causal, packed=True)
    x = rng.standard_normal((BATCH, LENGTH, EMBED))
    module = SelfAttention(HEADS, WIDTH, **options)
    params = jax.tree.map(lambda array: np.asarray(array, np.float64), random_params(module, x, ctx, scale=0.5))
    actual = jax.jit(module.apply)({'params': jax.tree.map(np.float32, params)}, np.float32(x), ctx)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    near = (np.abs(distance) < options.get('sliding_window', LENGTH)) & (distance >= 0 if causal else True)
    for row in range(BATCH):
        visible = near & (ids[row, :, None] == ids[row])
        expected = attend(params, x[row], positions[row], visible, options)
        np.testing.assert_allclose(actual[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('content', [True, False])
def test_relative_attention_equals_its_equation(content):
    """softmax(q k^T / sqrt(d) + bias) v, or softmax(bias) v without `content`."""
    lengths = [5, 3]
    x = np.random.default_rng(0).standard_normal((BATCH, 5, EMBED), np.float32)
    ctx = context_of_lengths(lengths, 5, num_keys=5)
    module = RelativeAttention(HEADS, WIDTH, content=content)
    params = jax.tree.map(np.asarray, random_params(module, x, ctx))
    assert ('query' in params) == ('key' in params) == content

    def project(name, row):
        return (row @ params[name]['kernel'] + params[name]['bias']).reshape(-1, HEADS, WIDTH)

    # T5 has one bucket for each distance below 8; keys after the query use the second half of the 32 buckets.
    distance = np.arange(5)[None] - np.arange(5)[:, None]
    bias = params['position_bias']['embedding'][:, np.abs(distance) + 16 * (distance > 0)]
    actual = jax.jit(module.apply)({'params': params}, x, ctx)
    for row, n in zip(range(BATCH), lengths, strict=True):
        logits = bias[:, :n, :n]
        if content:
            query, key = (project(name, x[row, :n]) for name in ('query', 'key'))
            logits = logits + np.einsum('qhd,khd->hqk', query, key) / WIDTH**0.5
        mixed = np.einsum('hqk,khd->qhd', softmax(logits), project('value', x[row, :n])).reshape(n, -1)
        expected = mixed @ params['out']['kernel'] + params['out']['bias']
        np.testing.assert_allclose(actual[row, :n], expected, rtol=1e-4, atol=1e-4)


def test_the_decoding_cache_holds_only_key_heads():
    module = SelfAttention(HEADS, WIDTH, num_kv_heads=2)
    ids, positions = make_segment_arrays([[LENGTH]] * BATCH, LENGTH)
    ctx = SequenceContext(ids, positions, causal=True, decode=True)
    cache = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((BATCH, LENGTH, EMBED)), ctx)['cache']
    assert {array.shape for array in jax.tree.leaves(cache)} == {(BATCH, 2, LENGTH, WIDTH)}


@pytest.mark.parametrize(
    ('build', 'words'),
    [
        (lambda: SelfAttention(HEADS, WIDTH, num_kv_heads=3), ('NUM_KV_HEADS', '4', '3')),
        (lambda: CrossAttention(HEADS, WIDTH, num_kv_heads=8), ('NUM_KV_HEADS', '4', '8')),
        (lambda: GatedMLP(8, activation='swish'), ('ACTIVATION', 'silu', 'swish')),
    ],
)
def test_invalid_settings_are_rejected_with_their_value(build, words):
    with pytest.raises(UserError) as error:
        build()
    assert all(word in str(error.value) for word in words)


def test_activations_equal_transformers():
    references.require('torch', 'transformers')
    import torch
    from transformers.activations import ACT2FN

    other_names = {'gelu': 'gelu_pytorch_tanh', 'gelu_exact': 'gelu'}
    x = np.linspace(-6, 6, 501, dtype=np.float32)
    for name, activation in ACTIVATIONS.items():
        expected = ACT2FN[other_names.get(name, name)](torch.from_numpy(x))
        np.testing.assert_allclose(activation(x), expected, rtol=1e-5, atol=1e-6)
