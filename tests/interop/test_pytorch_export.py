"""The PyTorch code that `--to_hf` writes computes what the Flax model computes."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import types

import jax
import numpy as np
import pytest
from flax import linen as nn

from remixer_t5x import build_model
from remixer_t5x.data import batch_formats
from remixer_t5x.interop.huggingface import pytorch_export, traced_modules
from remixer_t5x.interop.huggingface.traced_modules import UnsupportedModelError
from remixer_t5x.models import interface, lora
from tests.support import references, shipped_models
from tests.support.paths import CONFIGS

SIZES = {
    **{'VOCAB_SIZE': 96, 'EMBED_DIM': 32, 'HEAD_DIM': 8, 'NUM_HEADS': 4, 'MLP_DIM': 48, 'GMLP_DIM': 64, 'AMLP_DIM': 48},
    **{'NUM_ENCODER_LAYERS': 2, 'NUM_DECODER_LAYERS': 2, 'REMIXER_DIM': 40, 'HYPER_MIXER_DIM': 24, 'MIXER_DIM': 20},
    **{'HYPER_MIXER_MLP_DIM': 48, 'WIDER_MLP_DIM': 56, 'TIM_EMBED_DIM': 32, 'TIM_MLP_DIM': 48},
    **{'GATE_ATTENTION_DIM': 16, 'MAX_INPUT_LENGTH': 40, 'MAX_TARGET_LENGTH': 40},
}
T5GEMMA = """
from __gin__ import dynamic_registration
from remixer_t5x.models.architecture import encoder_decoder
from remixer_t5x.models.layers import embedding
from remixer_t5x.models.layers import norms
LAYER_NORM = @norms.RMSNorm
norms.RMSNorm.zero_centered = True
embedding.Embed.scale = 3.0
encoder_decoder.EncoderDecoder.shared_embedding = False
encoder_decoder.EncoderDecoder.tied = True
encoder_decoder.EncoderDecoder.begin_id = 2
encoder_decoder.EncoderDecoder.logit_softcap = 2.0
"""
ENCODER_DECODERS = (*('t5_1_0', 'remixer', 'mixer_enc_dec', 'gmlp_mixer', 'amlp', 'tim', 'fnet'),)
VARIANTS = {
    'linear_transformer, linear cross-attention': {'DECODER_CROSS': '@linear_attention.LinearCrossAttention'},
    'remixer, vector alpha, post-norm': {'COMPOSITION': '@remixer.VectorAlpha', 'LAYOUT': '@layer.PostNorm'},
    'remixer, gated composition': {'COMPOSITION': '@remixer.GatedComposition'},
    'remixer, gated alpha': {'COMPOSITION': '@remixer.GatedAlpha'},
    'hyper_mixer, its cross mixer, parallel': {
        'DECODER_CROSS': '@hyper_mixer.HyperMixerCross',
        'LAYOUT': '@layer.Parallel',
    },
    'gmlp, free matrix, additive gate, rezero': {
        'SPATIAL_WEIGHTS': '@gmlp.FreeSpatial',
        'GATE': '@gmlp.additive_gate',
        'LAYOUT': '@layer.ReZero',
    },
    't5_1_1, serialized': {'LAYOUT': '@layer.Serialized'},
    't5_1_1, later options': {
        'NUM_KV_HEADS': 1,
        'QK_NORM': True,
        'SLIDING_WINDOW': 6,
        'ACTIVATION': 'silu',
        'ENCODER_POSITION_BIAS': '@positions.AlibiBias',
    },
    'modern_t5, short window': {'LOCAL_WINDOW': 5},
}
DECODERS = ('remixer', 'mixer_enc_dec', 'hyper_mixer', 'gmlp', 'linear_transformer', 'tim', 'gpt2')
ENCODERS = ('t5_1_1', 'fnet', 'mixer_enc', 'hyper_mixer', 'bert', 'bert, one token type', 'modern_bert')
# Models whose modules and layouts are in the other cases.
COVERED = {'remixer_scaled'}
LENGTH = 40
VOCABULARY = types.SimpleNamespace(eos_id=1)
# An id that two rows of `rows` contain.
SEPARATOR = 67


@pytest.fixture
def torch():
    references.require('torch', 'transformers')
    import torch

    return torch


def make_model(name, *gin_files, **macros):
    files = [f'models/{name.partition(",")[0]}.gin', 'sizes/tiny.gin', *gin_files]
    return build_model(*files, **{**SIZES, **macros})


def random_params(model):
    """Returns random numbers around 0.5 for the scales of norms, and around 0 for other parameters."""
    shapes = nn.unbox(interface.compute_param_shapes(model, batch_formats.get_smallest_batch_shapes(model.model_type)))
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        return 0.5 * np.float32(path[-1].key == 'scale') + 0.1 * rng.standard_normal(leaf.shape, np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def export(folder, model):
    """Exports the model with random parameters, and returns the parameters and the model that transformers loads."""
    import transformers

    params = random_params(model)
    pytorch_export.write_pytorch_model(folder, pytorch_export.to_config(model, VOCABULARY), params)
    auto = getattr(transformers, pytorch_export.MODEL_CLASSES[model.model_type][1])
    return params, auto.from_pretrained(folder, trust_remote_code=True).eval()


def rows(count=3, first=None):
    """Returns token ids [count, 40]; without `first`, the second row has 25 tokens and padding."""
    tokens = np.random.default_rng(2).integers(2, SIZES['VOCAB_SIZE'], (count, LENGTH), dtype=np.int32)
    if first is None:
        tokens[1, 25:] = 0
    else:
        tokens[:, 0] = first
    return tokens


def check_equal(ours, theirs):
    ours, theirs = np.asarray(ours), theirs.detach().numpy()
    assert np.max(np.abs(ours)) > 0.1
    np.testing.assert_allclose(theirs, ours, atol=1e-5 * max(1, np.max(np.abs(ours))), rtol=0)


@pytest.mark.parametrize('name', [*ENCODER_DECODERS, *VARIANTS, 'modern_t5, options of T5Gemma'])
def test_encoder_decoders_have_the_same_logits(name, tmp_path, torch):
    files = []
    if name.endswith('T5Gemma'):
        files = [str(tmp_path / 't5gemma.gin')]
        pathlib.Path(files[0]).write_text(T5GEMMA)
    model = make_model(name, *files, **VARIANTS.get(name, {}))
    params, theirs = export(tmp_path / 'exported', model)
    inputs, targets = rows(), rows(first=0)[:, :20]
    ours = jax.jit(lambda p: model.module.apply({'params': p}, inputs, targets, enable_dropout=False))(params)
    check_equal(ours, theirs(input_ids=torch.tensor(inputs), decoder_input_ids=torch.tensor(targets)).logits)


@pytest.mark.parametrize('name', DECODERS)
def test_decoders_have_the_same_logits_with_padding_on_either_side(name, tmp_path, torch):
    positions = {'DECODER_POSITION_EMBEDDING': '@positions.SinusoidalPositions'}
    model = make_model(name, 'model_types/decoder_only.gin', **positions)
    params, theirs = export(tmp_path, model)
    tokens = rows(first=0)
    ours = np.asarray(jax.jit(lambda p: model.module.apply({'params': p}, tokens, enable_dropout=False))(params))[:, 1:]
    check_equal(ours, theirs(input_ids=torch.tensor(tokens[:, 1:])).logits)
    short, padding = tokens[:, 1:31], np.zeros((3, 9), np.int32)
    for parts in ((short, padding), (padding, short)):
        mask = torch.tensor(np.concatenate([np.full(part.shape, part is short) for part in parts], axis=1))
        logits = theirs(input_ids=torch.tensor(np.concatenate(parts, axis=1)), attention_mask=mask).logits
        check_equal(ours[:, :30], logits[mask].reshape(3, 30, -1))


@pytest.mark.parametrize('name', ENCODERS)
def test_encoders_have_the_same_logits(name, tmp_path, torch):
    model = make_model(name, *([] if 'bert' in name else ['model_types/encoder_only.gin']))
    if name.startswith('bert'):
        types = 1 if 'one' in name else 2
        input_layer = functools.partial(model.module.input_layer, token_types=types)
        model = dataclasses.replace(model, module=model.module.clone(separator_id=SEPARATOR, input_layer=input_layer))
    (params, theirs), inputs = export(tmp_path / 'masked', model), rows()
    ours = jax.jit(lambda p: model.logits(p, {'encoder_input_tokens': inputs}))(params)
    is_token = inputs > 0
    check_equal(np.asarray(ours)[is_token], theirs(input_ids=torch.tensor(inputs)).logits[torch.tensor(is_token)])
    model = make_model(name, 'model_types/classifier.gin', LABELS=('yes', 'no', 'maybe'))
    params, theirs = export(tmp_path / 'classifier', model)
    assert theirs.config.id2label == {0: 'yes', 1: 'no', 2: 'maybe'}
    ours = jax.jit(model.classify)(params, inputs)
    check_equal(ours, theirs(input_ids=torch.tensor(inputs)).logits.log_softmax(-1))


@pytest.mark.parametrize(('name', 'files'), [('remixer', ()), ('hyper_mixer', ('model_types/decoder_only.gin',))])
def test_generation_gives_the_same_greedy_tokens_for_100_inputs(name, files, tmp_path, torch):
    model, steps = make_model(name, *files), 12
    params, theirs = export(tmp_path, model)
    inputs = np.random.default_rng(3).integers(2, SIZES['VOCAB_SIZE'], (100, 16), dtype=np.int32)
    if model.model_type == 'encoder_decoder':
        inputs[::2, 9:] = 0
    ours = np.asarray(jax.jit(lambda p: model.generate(p, {model.input_array: inputs}, steps).tokens[:, 0])(params))
    tokens = theirs.generate(torch.tensor(inputs), max_new_tokens=steps, do_sample=False).numpy()
    tokens = tokens[:, 1:] if model.model_type == 'encoder_decoder' else tokens[:, inputs.shape[1] :]
    tokens = np.pad(tokens, ((0, 0), (0, steps - tokens.shape[1])))
    assert len({tuple(row) for row in tokens}) > 20
    np.testing.assert_array_equal(tokens, ours)


def test_a_model_saved_by_transformers_has_the_same_logits(tmp_path, torch):
    """transformers sorts the keys of config.json, but sublayers must keep their order."""
    _, exported = export(tmp_path / 'exported', make_model('t5_1_1', 'model_types/encoder_only.gin'))
    exported.save_pretrained(tmp_path / 'saved')
    saved = type(exported).from_pretrained(tmp_path / 'saved', trust_remote_code=True).eval()
    inputs = torch.tensor(rows())
    check_equal(exported(input_ids=inputs).logits.detach(), saved(input_ids=inputs).logits)


def test_the_logits_of_every_shipped_model_are_compared():
    names = {name.partition(',')[0] for name in (*ENCODER_DECODERS, *VARIANTS, *DECODERS, *ENCODERS)}
    models = {path.stem for path in (CONFIGS / 'models').glob('*.gin')}
    assert models - names - COVERED == set(), 'add to ENCODER_DECODERS and, if it can be causal, to DECODERS'


@pytest.mark.parametrize('name', [name for name in shipped_models.NAMES if name != 'tim_with_adapters'])
def test_every_shipped_model_has_pytorch_code_and_arrays_for_it(name):
    model = shipped_models.model(name)
    params = jax.tree.map(lambda box: np.zeros(box.shape, np.int8), nn.unbox(shipped_models.boxed_shapes(name)))
    arrays = {name: array.shape for name, array in pytorch_export.convert_to_pytorch(params).items()}
    tree = pytorch_export.build_module_tree(model)
    json.dumps(tree)
    assert dict(shapes_of(tree, '')) == arrays


def shapes_of(tree, prefix):
    """Yields names and shapes of the parameters that a tree declares, as the PyTorch classes register them."""
    for name, shape in tree.get('params', {}).items():
        yield f'{prefix}{name}', tuple(shape)
    for name, child in tree.get('children', {}).items():
        yield from shapes_of(child, f'{prefix}{name}.')


# Settings that follow from the parameter shapes or submodules, and `base_embed_dim` of muP, which the export rejects.
IMPLIED_SETTINGS = {
    *('axis', 'base_embed_dim', 'composition', 'decoder_stack', 'embed_dim', 'encoder_stack', 'features', 'first_norm'),
    *('head_dim', 'head_layer', 'hidden_dim', 'num_embeddings', 'outputs', 'parent', 'qk_norm', 'runs'),
    *('sentence_layer', 'shared_embedding', 'spatial', 'sublayers', 'use_bias', 'vocab_size', 'weights'),
}


@pytest.mark.parametrize('name', [name for name in shipped_models.NAMES if name != 'tim_with_adapters'])
def test_the_pytorch_code_reads_every_setting(name):
    """The PyTorch code would silently ignore a new field that it does not read."""
    names = {
        field
        for module in traced_modules.record_modules(shipped_models.model(name))[0].values()
        for field in traced_modules.read_module_settings(module)
    }
    ignored = {field for field in names if f"'{field}'" not in pytorch_export.read_pytorch_code()}
    assert ignored <= IMPLIED_SETTINGS, 'read the field as self.settings[...] in modeling_remixer_t5x.py'


def test_adapters_are_merged():
    model = lora.with_adapters(make_model('t5_1_1'), 'query', 2)
    params = random_params(model)
    query = params['encoder']['run_0']['layer']['self_attention']['query']
    merged = pytorch_export.convert_to_pytorch(params)['encoder.layers.1.self_attention.query.kernel']
    np.testing.assert_allclose(merged, query['kernel'][1] + query['lora_in'][1] @ query['lora_out'][1], rtol=1e-5)


class CustomMixer(nn.Module):
    @nn.compact
    def __call__(self, x, ctx):
        return x


def custom_pooling(hidden, ctx):
    return hidden[:, -1]


@pytest.mark.parametrize(
    ('name', 'files', 'macros', 'words'),
    [
        # The PyTorch classes do not scale the logits of a tied output by muP's base width.
        ('hyper_mixer', ['model_types/encoder_only.gin'], {'MUP_BASE_WIDTH': 8}, 'MUP_BASE_WIDTH'),
        ('t5_1_1', ['model_types/decoder_only.gin'], {'PREFIX_LM': True}, 'PREFIX_LM'),
        ('t5_1_1', [], {'ENCODER_MIXER': CustomMixer}, 'CustomMixer.*--to_shared'),
        (
            't5_1_1',
            ['model_types/classifier.gin'],
            {'POOLING': functools.partial(custom_pooling), 'LABELS': ('a', 'b')},
            'test_pytorch_export.custom_pooling.*--to_shared',
        ),
        ('t5_1_1', [], {'MUP_BASE_WIDTH': 8}, None),
    ],
)
def test_a_model_without_pytorch_code_is_rejected_by_name(name, files, macros, words):
    model = make_model(name, *files, **macros)
    with pytest.raises(UnsupportedModelError, match=words) if words else contextlib.nullcontext():
        assert pytorch_export.to_config(model, VOCABULARY)['module']['tied'] is False
