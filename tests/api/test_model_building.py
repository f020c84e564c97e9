"""build_model: models from gin files and macros, which later configurations do not change."""

import functools
import importlib

import gin
import jax
import numpy as np
import pytest
import seqio
from flax import linen as nn

from remixer_t5x import TrainedModel, UserError, build_model, load
from remixer_t5x.config import loading
from remixer_t5x.models import interface
from remixer_t5x.models.sublayers import fnet
from tests.support.error_lines import error_message

SHAPES = {'encoder_input_tokens': (1, 8), 'decoder_target_tokens': (1, 8)}
pytestmark = pytest.mark.usefixtures('clean_gin')
SMALL = {'VOCAB_SIZE': 64, 'EMBED_DIM': 16, 'NUM_HEADS': 2, 'HEAD_DIM': 8, 'MLP_DIM': 24}


def shapes(model):
    params = interface.compute_param_shapes(model, SHAPES)
    return jax.tree.map(lambda leaf: leaf.shape, params)


def test_build_model_equals_the_model_of_a_command():
    files = ['models/mixer_enc_dec.gin', 'sizes/tiny.gin']
    loading.load_gin_config(loading.ConfigSources(files), '%MODEL')
    expected = shapes(gin.query_parameter('%MODEL').scoped_configurable_fn())
    assert shapes(build_model(*files)) == expected


def test_a_model_does_not_change_with_later_configurations():
    first = build_model('models/t5_1_1.gin', 'sizes/tiny.gin', **SMALL)
    expected = shapes(first)
    second = build_model('models/fnet.gin', 'sizes/tiny.gin', **{**SMALL, 'EMBED_DIM': 8})
    assert shapes(first) == expected != shapes(second)
    gin.clear_config()
    assert shapes(first) == expected


def test_a_macro_may_be_a_class_a_function_or_a_gin_reference():
    files = ('models/t5_1_1.gin', 'sizes/tiny.gin')
    model = build_model(*files, ENCODER_MIXER=functools.partial(fnet.FNet), ENCODER_POSITION_BIAS=None, **SMALL)
    encoder = shapes(model)['encoder']
    assert 'position_bias' not in encoder
    layer = encoder['run_0']['layer']
    assert 'gated_mlp' in layer and 'self_attention' not in layer
    model = build_model('models/remixer.gin', 'sizes/tiny.gin', ENCODER_FEED_FORWARD='@feed_forward.GatedMLP', **SMALL)
    assert 'gated_mlp' in shapes(model)['encoder']['run_0']['layer']


@pytest.mark.parametrize('kind', [float, np.float64, np.float32])
def test_a_macro_may_be_a_numpy_number(kind):
    model = build_model('models/t5_1_1.gin', 'sizes/tiny.gin', DROPOUT_RATE=kind(0.25), **SMALL)
    assert 'DROPOUT_RATE = 0.25\n' in model.config


@pytest.mark.parametrize(
    ('files', 'macros', 'message'),
    [
        ((), {}, 'gin_files must not be empty'),
        (('models/t5_1_1.gin',), {}, 'sizes/'),
        (('models/t5_1_1.gin', 'sizes/tiny.gin'), {'EMBED_DIMM': 8}, 'did you mean EMBED_DIM'),
        (('models/t5_1_1.gin', 'sizes/tiny.gin'), {'VOCAB_SIZE': 0}, 'set VOCAB_SIZE'),
        (('models/t5_1_1.gin', 'sizes/tiny.gin'), {'ENCODER_MIXER': 'fnet.FNet'}, 'set ENCODER_MIXER = @fnet.FNet'),
        (('models/t5_1_1.gin', 'sizes/tiny.gin'), {'LORA': 'query'}, 'omit it, and train adapters as in docs'),
        (('models/t5_1_1.gin', 'sizes/tiny.gin'), {'BATCH_SIZE': 8}, 'BATCH_SIZE is a setting of runs/'),
        (('models/t5_1_1.gin', 'sizes/tiny.gin'), {'OPTIMIZER': fnet.FNet}, 'OPTIMIZER is a setting of runs/'),
    ],
)
def test_invalid_arguments_raise_a_one_line_error(files, macros, message):
    error = error_message(lambda: build_model(*files, **macros))
    assert message in error and '--gin' not in error


CUSTOM = """from remixer_t5x.models.sublayers.fnet import FNet


class Custom(FNet):
    pass
"""


def save(model, folder):
    params = jax.jit(lambda key: nn.unbox(model.init(key, SHAPES)))(jax.random.key(0))
    trained = TrainedModel(model, params, seqio.ByteVocabulary(extra_ids=0), {'inputs': 20, 'targets': 9})
    return trained, trained.save(folder)


def check_saved_model(model, folder):
    """Saves and loads the model, and returns the loaded model."""
    trained, path = save(model, folder)
    loaded = load(path)
    assert loaded.lengths == trained.lengths
    np.testing.assert_array_equal(loaded.score(['a'], ['b']), trained.score(['a'], ['b']))
    return loaded


def test_a_model_with_a_custom_mixer_is_saved_and_loaded(tmp_path, monkeypatch):
    (tmp_path / 'saved_mixers.py').write_text(CUSTOM)
    monkeypatch.syspath_prepend(tmp_path)
    mixer = importlib.import_module('saved_mixers').Custom
    files = ('models/t5_1_1.gin', 'sizes/tiny.gin')
    macros = {**SMALL, 'VOCAB_SIZE': 259, 'ENCODER_SUBLAYERS': (mixer,), 'ENCODER_POSITION_BIAS': None}
    loaded = check_saved_model(build_model(*files, **macros), tmp_path / 'saved')
    assert 'custom_norm' in loaded.params['encoder']['run_0']['layer']


def test_a_model_with_weights_for_each_position_is_saved_and_loaded(tmp_path):
    """The shapes of the parameters depend on TASK_FEATURE_LENGTHS, which `build_model` does not set."""
    check_saved_model(build_model('models/remixer.gin', 'sizes/tiny.gin', **{**SMALL, 'VOCAB_SIZE': 259}), tmp_path)


def test_a_mixer_that_cannot_be_imported_cannot_be_saved(tmp_path):
    mixer = functools.partial(fnet.FNet)
    model = build_model('models/t5_1_1.gin', 'sizes/tiny.gin', ENCODER_MIXER=mixer, **{**SMALL, 'VOCAB_SIZE': 259})
    with pytest.raises(UserError, match='importable module'):
        save(model, tmp_path / 'saved')
    assert not (tmp_path / 'saved').exists()
