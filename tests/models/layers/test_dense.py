"""GroupDense against block-diagonal matrices, its initial values, and the grouped norm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x import axes
from remixer_t5x.errors import UserError
from remixer_t5x.kernels.compile_target import compiling_for
from remixer_t5x.models.layers.dense import Dense, GroupDense, join_groups, split_groups
from remixer_t5x.models.layers.norms import GroupedRMSNorm, RMSNorm

AXES = (axes.MECHANISMS, axes.EMBED, axes.MLP)


def block_diagonal(kernels):
    groups, width, features = kernels.shape
    matrix = np.zeros((groups * width, groups * features))
    for j, kernel in enumerate(kernels):
        matrix[j * width : (j + 1) * width, j * features : (j + 1) * features] = kernel
    return matrix


@pytest.mark.parametrize(('platform', 'separate'), [('cpu', False), ('gpu', False), ('tpu', True)])
def test_group_dense_multiplies_by_a_block_diagonal_matrix(platform, separate):
    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
    def check(groups, width, features, seed):
        x = np.random.default_rng(seed).normal(size=(2, 3, groups * width)).astype(np.float32)
        module, parts = GroupDense(features, AXES), split_groups(x, groups, groups if separate else 1)
        params = nn.unbox(module.init(jax.random.key(seed), parts))['params']
        actual = join_groups(module.apply({'params': params}, parts))
        expected = x.astype(np.float64) @ block_diagonal(np.asarray(params['kernel'], np.float64))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)

    with compiling_for(platform):
        check()


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 4), st.integers(1, 5))
def test_split_and_join_are_inverse(groups, width):
    x = jnp.arange(6.0 * groups * width).reshape(2, 3, -1)
    for arrays in (1, groups):
        parts = split_groups(x, groups, arrays)
        assert [part.shape for part in parts] == [(groups // arrays, 2, 3, width)] * arrays
        np.testing.assert_array_equal(parts[-1][-1], x[..., -width:])
        np.testing.assert_array_equal(join_groups(parts), x)


def test_initial_variance_equals_that_of_one_group():
    plain = Dense(64, AXES[1:]).init(jax.random.key(0), jnp.zeros((1, 256)))
    grouped = GroupDense(64, AXES).init(jax.random.key(0), (jnp.zeros((8, 1, 256)),))
    deviations = [float(np.std(nn.unbox(variables)['params']['kernel'])) for variables in (plain, grouped)]
    np.testing.assert_allclose(deviations, 1 / 16, rtol=0.02)


def test_group_dense_computes_in_the_dtype_of_its_input():
    x = jnp.ones((2, 3, 4), jnp.bfloat16)
    (y,), variables = GroupDense(5, AXES).init_with_output(jax.random.key(0), (x,))
    kernel = variables['params']['kernel']
    assert (y.dtype, kernel.value.dtype, kernel.names) == (jnp.bfloat16, jnp.float32, AXES)


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
def test_grouped_norm_is_the_norm_of_each_part(platform):
    @settings(max_examples=5, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 99))
    def check(groups, width, seed):
        rng = np.random.default_rng(seed)
        x, scale = rng.normal(size=(2, 3, groups * width)), rng.normal(size=groups * width)
        scale, x = scale.astype(np.float32), x.astype(np.float32)
        actual = GroupedRMSNorm(groups).apply({'params': {'scale': scale}}, x)
        parts = zip(np.split(x, groups, -1), np.split(scale, groups), strict=True)
        expected = np.concatenate([RMSNorm().apply({'params': {'scale': s}}, part) for part, s in parts], -1)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)

    with compiling_for(platform):
        check()


def test_grouped_norm_rejects_a_width_it_cannot_split():
    with pytest.raises(UserError, match='num_groups must divide .* 8 features, got 3'):
        GroupedRMSNorm(3).init(jax.random.key(0), jnp.zeros((1, 8)))
