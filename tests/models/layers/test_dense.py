"""GroupDense against block-diagonal matrices, its initial values, and the grouped norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.kernels.compile_target import compile_for_platform
from remixer_t5x.models.layers.dense import Dense, GroupDense, join_groups, split_groups
from remixer_t5x.models.layers.norms import GroupedRMSNorm, RMSNorm

AXES = (axes.MECHANISMS, axes.EMBED, axes.MLP)


def block_diagonal(kernels):
    groups, width, features = kernels.shape
    matrix = np.zeros((groups * width, groups * features))
    for j, kernel in enumerate(kernels):
        matrix[j * width : (j + 1) * width, j * features : (j + 1) * features] = kernel
    return matrix


def test_initial_variance_equals_that_of_one_group():
    plain = Dense(64, AXES[1:]).init(jax.random.key(0), jnp.zeros((1, 256)))
    grouped = GroupDense(64, AXES).init(jax.random.key(0), (jnp.zeros((8, 1, 256)),))
    deviations = [float(np.std(nn.unbox(variables)['params']['kernel'])) for variables in (plain, grouped)]
    np.testing.assert_allclose(deviations, 1 / 16, rtol=0.02)


@pytest.mark.parametrize(('platform', 'separate'), [('cpu', False), ('tpu', True)])
def test_group_dense_multiplies_by_a_block_diagonal_matrix(platform, separate):
    groups, width, features = 3, 4, 5
    x = np.random.default_rng(0).normal(size=(2, 3, groups * width)).astype(np.float32)
    module, parts = GroupDense(features, AXES), split_groups(x, groups, groups if separate else 1)
    with compile_for_platform(platform):
        params = nn.unbox(jax.jit(module.init)(jax.random.key(0), parts))['params']
        actual = join_groups(jax.jit(module.apply)({'params': params}, parts))
    expected = x.astype(np.float64) @ block_diagonal(np.asarray(params['kernel'], np.float64))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize('arrays', [1, 3])
def test_split_and_join_are_inverse(arrays):
    x = np.arange(72.0).reshape(2, 3, 12)
    parts = split_groups(x, 3, arrays)
    assert [part.shape for part in parts] == [(3 // arrays, 2, 3, 4)] * arrays
    np.testing.assert_array_equal(parts[-1][-1], x[..., -4:])
    np.testing.assert_array_equal(join_groups(parts), x)


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
def test_grouped_norm_is_the_norm_of_each_part(platform):
    groups, width, rng = 3, 4, np.random.default_rng(0)
    x = rng.normal(size=(2, 3, groups * width)).astype(np.float32)
    scale = rng.normal(size=groups * width).astype(np.float32)
    with compile_for_platform(platform):
        actual = GroupedRMSNorm(groups).apply({'params': {'scale': scale}}, x)
        parts = zip(np.split(x, groups, -1), np.split(scale, groups), strict=True)
        expected = np.concatenate([RMSNorm().apply({'params': {'scale': s}}, part) for part, s in parts], -1)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
