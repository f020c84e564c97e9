"""Each layout equals its equation (HyperMixer, appendix F), for a mixer f and a feed-forward g."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x import build_model
from remixer_t5x.context import SequenceContext
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from remixer_t5x.models.architecture import layer
from remixer_t5x.models.layers.norms import RMSNorm

D = 4


class Affine(nn.Module):
    """A sublayer that is not linear in the scale of x, so that the position of norms matters."""

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
def test_layout_equals_its_equation(layout):
    sublayers = (functools.partial(Mixer, shift=0.3), functools.partial(FeedForward, shift=-0.2))
    module = layer.make_layer(sublayers, layout, norm=RMSNorm)
    x = jax.random.normal(jax.random.key(0), (2, 3, D))
    ctx = SequenceContext(jnp.ones((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32))
    params = nn.unbox(jax.jit(module.init)(jax.random.key(1), x, ctx)['params'])
    if layout is layer.ReZero:
        assert params['mixer_scale'] == 0.0 and params['feed_forward_scale'] == 0.0
        params = params | {'mixer_scale': jnp.asarray(0.5), 'feed_forward_scale': jnp.asarray(0.25)}

    def affine(name, shift):
        dense = params[name]['Dense_0']
        return lambda x: np.tanh(x @ np.asarray(dense['kernel']) + np.asarray(dense['bias']) + shift)

    expected = LAYOUTS[layout](np.asarray(x), affine('mixer', 0.3), affine('feed_forward', -0.2))
    np.testing.assert_allclose(jax.jit(module.apply)({'params': params}, x, ctx), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ('num_layers', 'runs'),
    [(1, [('A', 1)]), (4, [('ABC', 1), ('A', 1)]), (6, [('ABC', 2)]), (8, [('ABC', 2), ('AB', 1)])],
)
def test_alternate_repeats_its_layers_in_order(num_layers, runs):
    actual = [(''.join(factory().layers), count) for factory, count in layer.alternate('ABC', num_layers)]
    assert actual == runs


def test_parameter_names_are_numbered_snake_case_classes():
    self_mlp = sublayer(SelfMLP2=None)
    names = layer._make_sublayer_names((Mixer, functools.partial(FeedForward, shift=0.0), Mixer, self_mlp))
    assert names == ['mixer', 'feed_forward', 'mixer_2', 'self_mlp2']
    assert layer._make_sublayer_names((sublayer(MixerCross=None), Mixer)) == ['mixer_cross', 'mixer']


def sublayer(**call):
    """Creates a sublayer class from its name and its function of x."""
    ((name, function),) = call.items()
    return type(name, (nn.Module,), {'__call__': lambda self, x, ctx: function(x)})


@pytest.mark.parametrize(
    ('factory', 'message'),
    [
        (sublayer(Narrow=lambda x: x[..., :2]), r'output of Narrow must be bfloat16\[2, 3, 4\] .* bfloat16\[2, 3, 2\]'),
        (sublayer(Pair=lambda x: (x, x)), 'the output of Pair must be .* got tuple'),
        (sublayer(Wide=lambda x: x.astype(jnp.float32)), r'the output of Wide must be .* got float32\[2, 3, 4\]'),
        ('Mixer', "a sublayer must be a class or factory, got 'Mixer'; use @"),
        (Mixer(shift=0.1), 'a sublayer must be a class or factory, got an instance of Mixer; use @Mixer without'),
    ],
    ids=range(5),
)
def test_invalid_sublayer_raises(factory, message):
    module = layer.make_layer((factory,), layer.Serialized)
    ctx = SequenceContext(jnp.ones((2, 3), jnp.int32), jnp.zeros((2, 3), jnp.int32))
    with pytest.raises(UserError, match=message):
        jax.eval_shape(module.init, jax.random.key(1), jnp.ones((2, 3, D), jnp.bfloat16), ctx)


class Narrow(nn.Module):
    def __call__(self, x):
        return x[..., :1]


@pytest.mark.parametrize(
    ('macro', 'value', 'words'),
    [
        ('FINAL_NORM', Narrow, ('the output of Narrow must be float32[1, 4, 256]', 'got float32[1, 4, 1]')),
        ('LAYER_NORM', Narrow, ('the output of Narrow must be', 'got float32[1, 4, 1]')),
        ('FINAL_NORM', '@norms.GroupedRMSNorm', ('GroupedRMSNorm', "'num_groups'", 'CLASS.ATTRIBUTE = VALUE')),
        ('ENCODER_FEED_FORWARD', '@remixer.Remixer', ("'max_length'", '@encoder/remixer.Remixer')),
        ('LAYOUT', '@layer.Layer', ("'Layer' object is not callable", 'use another class')),
        ('ENCODER_MIXER', '@positions.AlibiBias', ('Abstract tracer value', 'use another class')),
        ('LAYOUT', '@layer.alternate', ("alternate() got an unexpected keyword argument 'sublayers'",)),
        ('INPUT_LAYER', '@attention.SelfAttention', ('SelfAttention.__call__() takes',)),
        ('TOKEN_HEAD', '@attention.SelfAttention', ('SelfAttention.__call__() missing', "'ctx'")),
        ('TOKEN_EMBEDDING', '@norms.RMSNorm', ('creates Embed', '@RMSNorm')),
        ('SPATIAL_WEIGHTS', '@norms.RMSNorm', ('RMSNorm.__init__()', "'max_length'")),
        ('GATE', '@gmlp.GMLP', ('GATE must be a function, got the Flax module GMLP',)),
        ('GATE', '@gmlp.GMLP()', ('GATE must be a function, got the Flax module GMLP',)),
        ('gmlp.GMLP.attention', '@attention.SelfAttention', ('SelfAttention', "'features'", 'use another class')),
    ],
)
def test_a_module_that_does_not_fit_its_setting_raises(macro, value, words):
    name = {'SPATIAL_WEIGHTS': 'gmlp', 'GATE': 'gmlp', 'gmlp.GMLP.attention': 'amlp'}.get(macro, 'remixer')
    files = [f'models/{name}.gin', 'sizes/tiny.gin', 'model_types/encoder_only.gin']
    with pytest.raises(UserError) as caught:
        model = build_model(*files, **{macro: value})
        shapes = batch_formats.get_batch_shapes(model.model_type, {'inputs': 4, 'targets': 4})
        interface.compute_param_shapes(model, shapes)
    message = str(caught.value)
    assert all(word in message for word in words) and '\n' not in message, message
