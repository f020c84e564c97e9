"""RelativeAttention against its equation in NumPy: softmax(q k^T / sqrt(d) + bias) v, and softmax(bias) v."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.context import make_sequence_context
from remixer_t5x.models.sublayers.attention import RelativeAttention

HEADS, HEAD_DIM, EMBED, LENGTH = 2, 4, 6, 5


@pytest.mark.parametrize('content', [True, False])
def test_relative_attention_equals_its_equation(content):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, LENGTH, EMBED)).astype(np.float32)
    tokens = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    ctx = dataclasses.replace(make_sequence_context(tokens), num_keys=LENGTH)
    module = RelativeAttention(HEADS, HEAD_DIM, content=content)
    params = nn.unbox(module.init(jax.random.key(0), x, ctx))['params']
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), params)
    assert ('query' in params) == ('key' in params) == content

    def project(name):
        projected = x @ params[name]['kernel'] + params[name]['bias']
        return projected.reshape(2, LENGTH, HEADS, HEAD_DIM)

    # T5 has one bucket for each distance below 8; keys after the query use the second half of the 32 buckets.
    distance = np.arange(LENGTH)[None] - np.arange(LENGTH)[:, None]
    logits = params['position_bias']['embedding'][:, np.abs(distance) + 16 * (distance > 0)][None]
    if content:
        logits = logits + np.einsum('bqhd,bkhd->bhqk', project('query'), project('key')) / HEAD_DIM**0.5
    weights = np.exp(logits) * (tokens > 0)[:, None, None, :]
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum('bhqk,bkhd->bqhd', weights, project('value')).reshape(2, LENGTH, -1)
    expected = mixed @ params['out']['kernel'] + params['out']['bias']
    output = module.apply({'params': params}, x, ctx)
    np.testing.assert_allclose(np.asarray(output)[tokens > 0], expected[tokens > 0], rtol=1e-4, atol=1e-4)
