"""A T5Gemma of transformers: losses, scores, greedy tokens and unsupported settings."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from remixer_t5x.interop.huggingface import model_folders
from tests.interop import small_models
from tests.support import hf_folders
from tests.support.error_lines import error_message

pytestmark = pytest.mark.usefixtures('clean_gin')


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    """Returns the recorded arrays, the opened folder, and our model with its parameters."""
    path = tmp_path_factory.mktemp('t5gemma')
    arrays = hf_folders.recorded_arrays('t5gemma_tiny')
    source = model_folders.open_model_folder(
        str(hf_folders.write(path / 'hf', small_models.T5GEMMA, hf_folders.weights_of(arrays), tokenizer=False))
    )
    model = hf_folders.model_from_source(source, path)
    return types.SimpleNamespace(arrays=arrays, source=source, model=model, params=hf_folders.read_params(path / 'hf'))


def test_losses_and_scores_equal_those_of_the_recorded_logits(tiny):
    targets = tiny.arrays['targets']
    weights = (targets > 0).astype(np.float32)
    batch = {
        'encoder_input_tokens': tiny.arrays['inputs'],
        'decoder_input_tokens': np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        'decoder_target_tokens': targets,
        'decoder_loss_weights': weights,
    }
    logits = tiny.arrays['logits'].astype(np.float64)
    log_p = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    expected = np.sum(np.take_along_axis(log_p, targets[..., None], -1)[..., 0] * weights, axis=1)
    np.testing.assert_allclose(tiny.model.score(tiny.params, batch), expected, rtol=1e-5)
    sums = tiny.model.loss(tiny.params, batch)[1]
    np.testing.assert_allclose(sums['loss'] - sums['z_loss'], -expected.sum(), rtol=1e-5)


def test_greedy_tokens_equal_recorded_values(tiny):
    batch, expected = {'encoder_input_tokens': tiny.arrays['inputs']}, tiny.arrays['greedy']
    ours = jax.jit(lambda p: tiny.model.predict(p, batch, expected.shape[1]))(tiny.params)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ('setting', 'value', 'allowed'),
    [
        ('query_pre_attn_scalar', 144, 'in the encoder, 16'),
        ('attn_logit_softcapping', 5.0, 'in the encoder, 1.0'),
        ('layer_types', ['full_attention'] * 2, 'layer'),
        ('rope_parameters', {'rope_type': 'yarn'}, "rope_type must be 'default'"),
        ('rope_scaling', {'rope_type': 'linear', 'factor': 2.0}, "rope_type must be 'default'"),
        ('rope_scaling', {'type': 'linear', 'factor': 2.0}, "rope_type must be 'default'"),
    ],
)
def test_an_unsupported_setting_of_config_json_is_named(tiny, tmp_path, setting, value, allowed):
    config = {**small_models.T5GEMMA, 'decoder': {**small_models.T5GEMMA['decoder'], setting: value}}
    folder = hf_folders.write(tmp_path / 'hf', config, hf_folders.weights_of(tiny.arrays), tokenizer=False)
    message = error_message(model_folders.open_model_folder, str(folder))
    assert f'{setting} to {value!r}; ' in message and allowed in message


def test_heads_of_any_size_are_written(tiny, tmp_path):
    family = dataclasses.replace(tiny.source.family, head_dim=24, query_scale=16)
    model = hf_folders.model_from_source(types.SimpleNamespace(family=family), tmp_path)
    assert hf_folders.describe(model, types.SimpleNamespace(eos_id=1)) == family


def test_missing_softcaps_have_the_defaults_of_transformers(tiny, tmp_path):
    without = {
        side: {name: value for name, value in small_models.T5GEMMA[side].items() if 'softcap' not in name}
        for side in ('encoder', 'decoder')
    }
    config = {**small_models.T5GEMMA, **without}
    folder = hf_folders.write(tmp_path / 'hf', config, hf_folders.weights_of(tiny.arrays), tokenizer=False)
    family = model_folders.open_model_folder(str(folder)).family
    # The defaults of T5GemmaModuleConfig.
    assert (family.softcap, family.final_softcap) == (50.0, 30.0)
