"""Position biases and rotary embeddings against recorded and live values of Hugging Face's transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers import positions
from tests.support import references

# Buckets of T5Attention in transformers 5.23.0 for keys before the query.
DISTANCES = [0, 1, 7, 8, 15, 16, 31, 32, 64, 127, 128, 500]
BUCKETS = {True: [0, 1, 7, 8, 9, 10, 11, 12, 14, 15, 15, 15], False: [0, 1, 7, 8, 15, 16, 21, 21, 26, 31, 31, 31]}


@pytest.mark.parametrize('bidirectional', [True, False])
def test_position_buckets_equal_recorded_values(bidirectional):
    before = positions.relative_position_bucket(-jnp.asarray(DISTANCES), bidirectional=bidirectional)
    np.testing.assert_array_equal(before, BUCKETS[bidirectional])
    after = positions.relative_position_bucket(jnp.asarray(DISTANCES[1:]), bidirectional=bidirectional)
    np.testing.assert_array_equal(after, np.add(BUCKETS[True][1:], 16) if bidirectional else 0)


@pytest.mark.parametrize(
    ('bidirectional', 'options', 'words'),
    [
        (True, {'max_distance': 8}, 'max_distance must be above 8 .* got 8'),
        (False, {'max_distance': 16}, 'max_distance must be above 16 .* got 16'),
        (True, {'num_buckets': 3}, 'num_buckets must be .* 4 in an encoder, got 3'),
        (False, {'num_buckets': 1}, 'num_buckets must be at least 2.* got 1'),
    ],
)
def test_buckets_that_cannot_hold_all_distances_raise(bidirectional, options, words):
    with pytest.raises(UserError, match=words):
        positions.relative_position_bucket(jnp.asarray(DISTANCES), bidirectional=bidirectional, **options)


# Slopes of build_alibi_tensor in transformers 5.23.0 for 12 heads.
SLOPES = [2.0**-power for power in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)]


def alibi(num_heads, length, causal):
    ids, index = np.ones((1, length), np.int32), np.arange(length)[None]
    bias = positions.AlibiBias(num_heads)(length, SequenceContext(ids, index, causal=causal))
    return np.asarray(bias)[0]  # [heads, query, key]


@pytest.mark.parametrize('causal', [True, False])
def test_alibi_is_a_slope_times_the_distance(causal):
    distance = np.abs(np.arange(6)[:, None] - np.arange(6))
    np.testing.assert_allclose(alibi(12, 6, causal), -np.multiply.outer(SLOPES, distance), rtol=1e-6)


@pytest.mark.parametrize('num_heads', [1, 8, 12, 20])
def test_alibi_equals_transformers_bloom(num_heads):
    """BLOOM adds slope * key position; the difference from ours is a constant per query, which softmax ignores."""
    references.require('torch', 'transformers')
    import torch
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 9), num_heads, torch.float32).numpy()[:, 0]
    query = np.arange(9)
    expected = theirs[:, None, :] - theirs[:, :, None]  # [heads, query, key]
    visible = query[:, None] >= query
    np.testing.assert_allclose(alibi(num_heads, 9, True)[:, visible], expected[:, visible], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('theta', [1e4, 16e4])
def test_rotary_embedding_equals_transformers_llama(theta):
    references.require('torch', 'transformers')
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 300, 3, 16), np.float32)
    index = np.tile(np.arange(300), (2, 1))
    config = LlamaConfig(head_dim=16, rope_parameters={'rope_type': 'default', 'rope_theta': theta})
    angles = LlamaRotaryEmbedding(config)(torch.from_numpy(x), torch.from_numpy(index))
    expected, _ = apply_rotary_pos_emb(*(torch.from_numpy(x),) * 2, *angles, unsqueeze_dim=2)
    ctx = SequenceContext(np.ones_like(index), index)
    actual = positions.RotaryEmbedding(theta)(jnp.asarray(x), ctx)
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-5)
