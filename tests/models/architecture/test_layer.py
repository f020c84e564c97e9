"""Each layout equals its equation (HyperMixer, appendix F), for a mixer f and a feed-forward g."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x.context import SequenceContext
from remixer_t5x.errors import UserError
from remixer_t5x.models.architecture import layer

D = 4


class Affine(nn.Module):
    """A sublayer that is not linear in scale, so that the place of a norm matters."""

    shift: float

    @nn.compact
    def __call__(self, x, ctx):
        return jnp.tanh(nn.Dense(D)(x) + self.shift)


class Mixer(Affine):
    pass


class FeedForward(Affine):
    pass


def norm(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


LAYOUTS = {
    layer.PreNorm: lambda x, f, g: (y := x + f(norm(x))) + g(norm(y)),
    layer.PostNorm: lambda x, f, g: norm((y := norm(x + f(x))) + g(y)),
    layer.SandwichNorm: lambda x, f, g: (y := x + norm(f(norm(x)))) + norm(g(norm(y))),
    layer.ReZero: lambda x, f, g: (y := x + 0.5 * f(x)) + 0.25 * g(y),
    layer.Parallel: lambda x, f, g: x + f(norm(x)) + g(norm(x)),
    layer.Serialized: lambda x, f, g: x + g(norm(x + f(norm(x)))),
}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_equation(layout):
    sublayers = (functools.partial(Mixer, shift=0.3), functools.partial(FeedForward, shift=-0.2))
    module = layer.make_layer(sublayers, layout)
    x = jax.random.normal(jax.random.key(0), (2, 3, D))
    ctx = SequenceContext(jnp.ones((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32))
    params = nn.unbox(module.init(jax.random.key(1), x, ctx)['params'])
    if layout is layer.ReZero:
        assert params['mixer_scale'] == 0.0 and params['feed_forward_scale'] == 0.0
        params = params | {'mixer_scale': jnp.asarray(0.5), 'feed_forward_scale': jnp.asarray(0.25)}

    def affine(name, shift):
        dense = params[name]['Dense_0']
        return lambda x: np.tanh(x @ np.asarray(dense['kernel']) + np.asarray(dense['bias']) + shift)

    wanted = LAYOUTS[layout](np.asarray(x), affine('mixer', 0.3), affine('feed_forward', -0.2))
    np.testing.assert_allclose(module.apply({'params': params}, x, ctx), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ('num_layers', 'runs'),
    [(1, [('A', 1)]), (4, [('ABC', 1), ('A', 1)]), (6, [('ABC', 2)]), (8, [('ABC', 2), ('AB', 1)])],
)
def test_alternate_repeats_its_layers_in_order(num_layers, runs):
    actual = [(''.join(factory().layers), count) for factory, count in layer.alternate('ABC', num_layers)]
    assert actual == runs


def test_parameters_are_named_after_classes_and_repeats_are_numbered():
    class SelfMLP2(nn.Module):
        pass

    names = layer._parameter_names((Mixer, functools.partial(FeedForward, shift=0.0), Mixer, SelfMLP2))
    assert names == ['mixer', 'feed_forward', 'mixer_2', 'self_mlp2']


class TakesNoContext(nn.Module):
    def __call__(self, x):
        return x


class Narrow(nn.Module):
    width: int = 3

    def __call__(self, x, ctx):
        return x[..., : self.width]


class HasNoDefault(nn.Module):
    width: int

    def __call__(self, x, ctx):
        return x


class Tuple(nn.Module):
    def __call__(self, x, ctx):
        return x, x


class Float32(nn.Module):
    def __call__(self, x, ctx):
        return x.astype(jnp.float32)


class NotCallable(nn.Module):
    pass


@pytest.mark.parametrize(
    ('factory', 'said'),
    [
        (TakesNoContext, r'TakesNoContext cannot be called: too many positional arguments; .*\(x, ctx\) -> y'),
        (NotCallable, 'the sublayer NotCallable cannot be called: it has no __call__'),
        (functools.partial(Narrow, width=2), r'sublayer Narrow returns bfloat16\[2, 3, 2\] for bfloat16\[2, 3, 4\]'),
        (functools.partial(Narrow, width=1), r'the sublayer Narrow returns bfloat16\[2, 3, 1\]'),
        (Tuple, 'the sublayer Tuple returns a tuple'),
        (Float32, r'the sublayer Float32 returns float32\[2, 3, 4\] for bfloat16\[2, 3, 4\]'),
        (HasNoDefault, "the sublayer HasNoDefault cannot be made: missing a required argument: 'width'; bind"),
        (functools.partial(Narrow, widht=1), "cannot be made: got an unexpected keyword argument 'widht'"),
        (lambda x, ctx: x, 'the sublayer <lambda> cannot be made'),
        (Narrow(2), r'the sublayer Narrow\(\) is a module and not a class; give @Narrow without \(\)'),
    ],
    ids=range(10),
)
@pytest.mark.parametrize('layout', LAYOUTS)
def test_a_sublayer_that_does_not_fit_the_stack_is_named(layout, factory, said):
    module = layer.make_layer((factory,), layout)
    ctx = SequenceContext(jnp.ones((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(UserError, match=said):
        jax.eval_shape(module.init, jax.random.key(1), jnp.ones((2, 3, D), jnp.bfloat16), ctx)
