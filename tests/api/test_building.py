"""Models from gin files and macros: plain values that later configurations do not change."""

import functools

import gin
import jax
import pytest

from remixer_t5x import UserError, build_model
from remixer_t5x.config import loading
from remixer_t5x.models import interface
from remixer_t5x.models.sublayers import fnet

SHAPES = {'encoder_input_tokens': (1, 8), 'decoder_target_tokens': (1, 8)}
SMALL = {'VOCAB_SIZE': 64, 'EMBED_DIM': 16, 'NUM_HEADS': 2, 'HEAD_DIM': 8, 'MLP_DIM': 24}


@pytest.fixture(autouse=True)
def clean():
    yield
    gin.clear_config()


def shapes(model):
    params = interface.param_shapes(model, SHAPES)
    return jax.tree.map(lambda leaf: leaf.shape, params)


@pytest.mark.parametrize('name', ['t5_1_0', 'remixer_scaled', 'tim', 'hyper_mixer', 'amlp', 'mixer_enc_dec'])
def test_it_is_the_model_that_a_command_makes(name):
    files = [f'models/{name}.gin', 'sizes/tiny.gin']
    loading.load(loading.Given(files), '%MODEL')
    wanted = shapes(gin.query_parameter('%MODEL').scoped_configurable_fn())
    assert shapes(build_model(*files)) == wanted


def test_a_model_survives_the_next_configuration():
    first = build_model('models/t5_1_1.gin', 'sizes/tiny.gin', **SMALL)
    wanted = shapes(first)
    second = build_model('models/fnet.gin', 'sizes/tiny.gin', **{**SMALL, 'EMBED_DIM': 8})
    assert shapes(first) == wanted != shapes(second)
    gin.clear_config()
    assert shapes(first) == wanted


def test_a_class_or_function_is_a_macro_value():
    files = ('models/t5_1_1.gin', 'sizes/tiny.gin')
    model = build_model(*files, ENCODER_MIXER=functools.partial(fnet.FNet), ENCODER_POSITION_BIAS=None, **SMALL)
    encoder = shapes(model)['encoder']
    assert 'position_bias' not in encoder
    layer = encoder['run_0']['layer']
    assert 'gated_mlp' in layer and 'self_attention' not in layer


def test_a_reference_is_a_macro_value():
    model = build_model('models/remixer.gin', 'sizes/tiny.gin', ENCODER_FEED_FORWARD='@gated_mlp.GatedMLP', **SMALL)
    assert 'gated_mlp' in shapes(model)['encoder']['run_0']['layer']


@pytest.mark.parametrize(
    ('files', 'macros', 'message'),
    [
        ((), {}, 'takes gin files'),
        (('models/t5_1_1.gin',), {}, 'sizes/'),
        (('models/t5_1_1.gin', 'sizes/tiny.gin'), {'EMBED_DIMM': 8}, 'did you mean EMBED_DIM'),
        (('models/t5.gin',), {}, 'not found'),
        (('sizes/tiny.gin',), {}, 'MODEL'),
    ],
)
def test_a_mistake_is_one_line(files, macros, message):
    with pytest.raises(UserError, match=message) as error:
        build_model(*files, **macros)
    assert '\n' not in str(error.value)
