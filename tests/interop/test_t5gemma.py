"""A T5Gemma of transformers: recorded logits and greedy tokens, written files, and unsupported settings."""

import json
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from remixer_t5x.devices.partition import unbox
from remixer_t5x.interop.huggingface import model_folders
from remixer_t5x.models import interface
from tests.support import hf_folders
from tests.support.error_lines import error_message

STACK = {
    'vocab_size': 48, 'hidden_size': 16, 'intermediate_size': 20, 'num_attention_heads': 2, 'head_dim': 16,
    'num_key_value_heads': 1, 'query_pre_attn_scalar': 16, 'sliding_window': 4, 'attn_logit_softcapping': 1.0,
    'final_logit_softcapping': 3.0, 'rms_norm_eps': 1e-6, 'max_position_embeddings': 8192, 'bos_token_id': 2,
    'eos_token_id': 1,
}  # fmt: skip
CONFIG = {
    'model_type': 't5gemma',
    'encoder': {**STACK, 'num_hidden_layers': 3},
    'decoder': {**STACK, 'num_hidden_layers': 2},
}
VOCABULARY = types.SimpleNamespace(eos_id=1)
pytestmark = pytest.mark.usefixtures('clean_gin')


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    """Returns the recorded arrays, the opened folder, and our model with its parameters."""
    path = tmp_path_factory.mktemp('t5gemma')
    arrays = hf_folders.recorded_arrays('t5gemma_tiny')
    source = model_folders.open_model_folder(
        str(hf_folders.write(path / 'hf', CONFIG, hf_folders.weights_of(arrays), tokenizer=False))
    )
    model = hf_folders.model_from_source(source, path)
    return types.SimpleNamespace(arrays=arrays, source=source, model=model, params=source.read_params())


def test_logits_equal_recorded_values(tiny):
    targets = tiny.arrays['targets']
    # Our decoder inputs begin with id 0, which the model replaces with T5Gemma's begin token.
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    batch = {'input_ids': tiny.arrays['inputs'], 'decoder_input_ids': shifted}
    ours = np.asarray(jax.jit(lambda p: tiny.source.family.compute_remixer_logits(tiny.model, p, batch))(tiny.params))
    expected = tiny.arrays['logits']
    assert np.max(np.abs(ours - expected)[targets > 0]) < 1e-5 * np.max(np.abs(expected))
    assert 2 < np.max(np.abs(expected)) < 3  # the softcap


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


def test_a_folder_is_written_back_bit_for_bit(tiny, tmp_path):
    shapes = {'encoder_input_tokens': (1, 4), 'decoder_target_tokens': (1, 4)}
    ours = unbox(interface.compute_param_shapes(tiny.model, shapes))
    assert jax.tree.map(np.shape, tiny.params) == jax.tree.map(np.shape, ours)
    family, runs = hf_folders.describe(tiny.model, VOCABULARY)
    assert (family, dict(runs)) == (tiny.source.family, tiny.source.family.default_layer_runs())
    back = model_folders.write_model_folder(str(tmp_path / 'back'), family, tiny.params, runs)
    written, weights = load_file(back / 'model.safetensors'), hf_folders.weights_of(tiny.arrays)
    assert written.keys() == weights.keys()
    assert all(np.array_equal(written[name], array) for name, array in weights.items())
    config = json.loads((back / 'config.json').read_text())
    for side in ('encoder', 'decoder'):
        assert CONFIG[side].items() <= config[side].items()
    assert model_folders.open_model_folder(str(back)).family == family


@pytest.mark.parametrize(
    ('setting', 'value', 'allowed'),
    [
        ('query_pre_attn_scalar', 144, 'in the encoder, 16'),
        ('layer_types', ['full_attention'] * 2, 'layer'),
        ('rope_parameters', {'rope_type': 'yarn'}, "rope_type must be 'default'"),
    ],
)
def test_an_unsupported_setting_of_config_json_is_named(tiny, tmp_path, setting, value, allowed):
    config = {**CONFIG, 'decoder': {**CONFIG['decoder'], setting: value}}
    folder = hf_folders.write(tmp_path / 'hf', config, hf_folders.weights_of(tiny.arrays), tokenizer=False)
    message = error_message(model_folders.open_model_folder, str(folder))
    assert f'{setting} to {value!r}; ' in message and allowed in message
