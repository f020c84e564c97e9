"""Number of traces of a layer, the random numbers of a seed, which depend on it, and wrong position modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture import layer, stack
from remixer_t5x.models.layers import positions
from remixer_t5x.models.layers.dense import dropout
from remixer_t5x.models.sublayers import attention

calls = []


class Counted(nn.Module):
    """A sublayer with a parameter and dropout that records its traces."""

    @nn.compact
    def __call__(self, x, ctx):
        calls.append(x.shape)
        kernel = self.param('kernel', nn.initializers.normal(), (x.shape[-1], x.shape[-1]))
        return dropout(0.5, x @ kernel, deterministic=ctx.deterministic)


STACK = stack.Stack(runs=((functools.partial(layer.make_layer, (Counted,)), 3),))
X = np.ones((1, 2, 4), np.float32)


def context(deterministic=True):
    return SequenceContext(np.ones((1, 2), np.int32), np.arange(2)[None], deterministic=deterministic)


@pytest.fixture(scope='module')
def variables():
    return jax.jit(STACK.init)(jax.random.key(0), X, context())


def count_traces(function, *args):
    calls.clear()
    jax.eval_shape(function, *args)
    return len(calls)


def test_a_layer_without_random_numbers_is_traced_once(variables):
    assert count_traces(lambda variables: STACK.apply(variables, X, context()), variables) == 1


def test_shapes_need_one_trace(variables):
    with stack.trace_layers_once():
        assert count_traces(lambda key: STACK.init(key, X, context()), jax.random.key(0)) == 1
        shapes = jax.eval_shape(lambda key: STACK.init(key, X, context()), jax.random.key(0))
    assert jax.tree.structure(shapes) == jax.tree.structure(variables)
    assert jax.tree.leaves(jax.tree.map(jnp.shape, shapes)) == jax.tree.leaves(jax.tree.map(jnp.shape, variables))


def test_a_seed_returns_the_recorded_numbers(variables):
    """Flax counts the keys of all traces of a layer, so the keys depend on the number of traces."""
    kernel = variables['params']['run_0']['layer']['counted']['kernel']
    dropped = jax.jit(lambda key: STACK.apply(variables, X, context(False), rngs={'dropout': key}))(jax.random.key(1))
    np.testing.assert_allclose(kernel[:, 0, 0], [-0.010857144, 0.012349445, 0.010359694], rtol=1e-6)
    np.testing.assert_allclose(dropped[0, 0], [1.0449876, 0.9938751, 0.9626720, 0.9967308], rtol=1e-6)


@pytest.mark.parametrize(
    ('modules', 'message'),
    [
        ({'position_bias': positions.SinusoidalPositions}, r'position bias must be \[1, heads, .*got \[1, 2, 2\]'),
        ({'position_bias': functools.partial(positions.AlibiBias, 3)}, r'with 2 heads, got \[1, 3, 2, 2\]'),
        # One bias for all heads, and a different bias for each row of the batch.
        ({'position_bias': functools.partial(positions.AlibiBias, 1)}, r'with 2 heads, got \[1, 1, 2, 2\]'),
        ({'position_bias': lambda name: lambda length, ctx: jnp.zeros((3, 2, 2, 2))}, r'got \[3, 2, 2, 2\]'),
        ({'position_embedding': functools.partial(positions.AlibiBias, 2)}, r'position embedding .*got \(1, 2, 4, 4\)'),
    ],
)
def test_wrong_position_module_raises(modules, message):
    attend = functools.partial(attention.SelfAttention, num_heads=2, head_dim=2)
    module = stack.Stack(runs=((functools.partial(layer.make_layer, (attend,)), 1),), **modules)
    with pytest.raises(UserError, match=message):
        jax.eval_shape(module.init, jax.random.key(0), X, context())
