"""Every model family of Hugging Face: weights convert to ours and back bit by bit, and compute the same."""

import functools
import json
import pathlib
import re
import shutil
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from remixer_t5x import build_model
from remixer_t5x.api import saved_models
from remixer_t5x.cli import conversions
from remixer_t5x.config import loading
from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface import bert, model_folders, param_mapping, t5_tokenizer
from remixer_t5x.interop.huggingface.model_family import HuggingFaceConfig
from remixer_t5x.interop.huggingface.t5 import T5
from remixer_t5x.interop.huggingface.t5gemma import T5Gemma
from remixer_t5x.models.beam_search import BeamSearch, PowerPenalty
from remixer_t5x.models.sublayers import attention
from tests.support import hf_folders
from tests.support.error_lines import error_message
from tests.support.hf_folders import CONFIGS

GPT2_END = hf_folders.GPT2['eos_token_id']
VOCABULARY, GPT2_VOCABULARY = (types.SimpleNamespace(eos_id=end, shifted=True) for end in (1, GPT2_END + 1))
pytestmark = pytest.mark.usefixtures('clean_gin')


class Tiny:
    """A recorded tiny model: its folder with three shards, our parameters and our model."""

    def __init__(self, name, path):
        self.name, self.arrays = name, hf_folders.recorded_arrays(name)
        self.config, self.weights = CONFIGS[name], hf_folders.weights_of(self.arrays)
        folder = hf_folders.write(path / name, self.config, self.weights, shards=3)
        source = model_folders.open_model_folder(folder)
        self.family, self.model = source.family, hf_folders.model_from_source(source, path)
        self.params = source.read_params(saved_models.get_abstract_params(self.model))


@pytest.fixture(scope='module', params=CONFIGS)
def tiny(request, tmp_path_factory):
    return Tiny(request.param, tmp_path_factory.mktemp('tiny'))


# `test_losses_gradients_and_answers_of_a_tied_scaled_t5` computes those of T5 v1.0.
@pytest.mark.parametrize('tiny', ['t5_v1_1_tiny', 'umt5_tiny', 'gpt2_tiny', 't5gemma_tiny'], indirect=True)
def test_scores_and_greedy_tokens_equal_recorded_values(tiny):
    arrays, shift = tiny.arrays, tiny.family.id_offset
    theirs = arrays['tokens' if shift else 'targets']
    logits, targets = arrays['logits'][:, : theirs.shape[1]].astype(np.float64), theirs + shift
    log_p = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    expected = np.sum(np.take_along_axis(log_p, theirs[..., None], -1)[..., 0] * (targets > 0), axis=1)
    inputs = {} if shift else {'encoder_input_tokens': arrays['inputs']}
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    batch = {**inputs, 'decoder_input_tokens': shifted, 'decoder_target_tokens': targets}
    np.testing.assert_allclose(jax.jit(tiny.model.score)(tiny.params, batch), expected, rtol=1e-5)
    if 'greedy' in arrays:
        length = arrays['greedy'].shape[1]
        greedy = jax.jit(lambda params: tiny.model.generate(params, inputs, length).tokens[:, 0])(tiny.params)
        np.testing.assert_array_equal(greedy, arrays['greedy'])


@pytest.mark.parametrize('tiny', ['t5_v1_0_tiny'], indirect=True)
def test_losses_gradients_and_answers_of_a_tied_scaled_t5(tiny):
    """The loss and the generated tokens equal recorded values; the gradient equals a difference quotient."""
    arrays, model, params = tiny.arrays, tiny.model, tiny.params
    targets, inputs = arrays['targets'], {'encoder_input_tokens': arrays['inputs']}
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    batch = {**inputs, 'decoder_input_tokens': shifted, 'decoder_target_tokens': targets}
    compute_loss = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    (loss, sums), gradient = compute_loss(params, batch)
    expected = pytest.approx(float(arrays['loss']), rel=1e-5)
    assert float((loss - sums['z_loss']) / sums['weights']) == expected
    assert -float(jax.jit(model.score)(params, batch).sum() / sums['weights']) == expected

    length = arrays['greedy'].shape[1]
    search = BeamSearch(arrays['beams'].shape[1], PowerPenalty(0.6))
    beams = jax.jit(lambda params: model.generate(params, inputs, length, decoder=search))(params)
    np.testing.assert_array_equal(beams.tokens, arrays['beams'])
    np.testing.assert_allclose(beams.scores, arrays['beam_scores'], rtol=1e-5)

    # The loss computes its own gradient of the transposed table, which is also the embedding.
    table = params['token_embedder']['embedding']
    direction = np.random.default_rng(0).standard_normal(table.shape, np.float32)
    above, below = (
        float(compute_loss({**params, 'token_embedder': {'embedding': table + sign * 1e-3 * direction}}, batch)[0][0])
        for sign in (1, -1)
    )
    slope = np.sum(gradient['token_embedder']['embedding'] * direction)
    assert slope == pytest.approx((above - below) / 2e-3, rel=2e-2)


def test_a_folder_is_written_back_bit_for_bit(tiny, tmp_path):
    vocabulary = GPT2_VOCABULARY if tiny.name == 'gpt2_tiny' else VOCABULARY
    assert hf_folders.describe(tiny.model, vocabulary) == tiny.family
    assert {leaf.dtype.name for leaf in jax.tree.leaves(tiny.params)} == {'float32'}
    back = model_folders.write_model_folder(tmp_path / 'back', tiny.family, tiny.params)
    written = load_file(back / 'model.safetensors')
    assert set(written) == set(tiny.weights)
    for name, array in tiny.weights.items():
        assert written[name].dtype == np.float32 and np.array_equal(written[name], array), name
    assert model_folders.open_model_folder(back).family == tiny.family
    config = json.loads((back / 'config.json').read_text())
    stacks = [name for name in ('encoder', 'decoder') if name in tiny.config]
    pairs = [(tiny.config[name], config[name]) for name in stacks] or [(tiny.config, config)]
    for settings_read, settings_written in pairs:
        tied = {'tie_word_embeddings': settings_written['tie_word_embeddings']}
        assert {**settings_read, **tied}.items() <= settings_written.items()
    if isinstance(tiny.family, T5):
        generation = json.loads((back / 'generation_config.json').read_text())
        assert generation == {'decoder_start_token_id': 0, 'eos_token_id': 1, 'pad_token_id': 0}


def test_layers_of_runs_and_blocks_are_numbered_in_their_order():
    layers = param_mapping.LayerIndices({
        'decoder/run_0/layer/a': (1, 5), 'encoder/run_0/layer/a': (2, 5), 'encoder/run_10/layer/a': (1, 5),
        'encoder/run_2/layer/layer_0/a': (3, 5), 'encoder/run_2/layer/layer_1/b': (3, 5),
    })  # fmt: skip
    paths = ('encoder/run_0/layer/a/b', 'encoder/run_2/layer/layer_0', 'encoder/run_2/layer/layer_1/b', 'encoder/norm')
    expected = [('encoder/layer/a/b', [0, 1]), ('encoder/layer', [2, 4, 6]), ('encoder/layer/b', [3, 5, 7])]
    located = [layers.locate(path) for path in paths]
    assert [(path, list(indices)) for path, indices in located[:3]] == expected
    assert located[3] == ('encoder/norm', None) and list(layers.locate('encoder/run_10/layer/a')[1]) == [8]


class SelfAttention(attention.SelfAttention):
    """A custom class with the name and the parameters of a class of this package."""


def custom_pooling(hidden, ctx):
    return hidden[:, -1]


def test_custom_classes_and_functions_are_not_exported_as_those_of_this_package():
    custom_attention = functools.partial(SelfAttention, num_heads=4, head_dim=16)
    pooling = functools.partial(custom_pooling)
    models = {
        'tests.interop.test_families.SelfAttention': build_model(
            'models/t5_1_1.gin', 'sizes/tiny.gin', ENCODER_MIXER=custom_attention
        ),
        'tests.interop.test_families.custom_pooling': hf_folders.bert_model(
            'model_types/classifier.gin', LABELS=('a', 'b'), POOLING=pooling
        ),
    }
    for name, model in models.items():
        assert f"is '{name}', not '" in error_message(hf_folders.describe, model, VOCABULARY)


def shipped(*files, flags=()):
    return loading.load_macro_values(loading.ConfigSources([*files, 'sizes/tiny.gin'], flags), 'MODEL')[0]


BIASES = ('attention.SelfAttention.position_bias', '@positions.RelativePositionBias')
BEGIN = ('decoder_only.DecoderOnly.begin_id', '60')
# Models with dropout can be exported, because dropout does not affect inference.
DROPOUT = ('DROPOUT_RATE', '0.1')
FNET = [('ENCODER_MIXER', '@fnet.FNet'), ('ENCODER_POSITION_BIAS', 'None')]


@pytest.mark.parametrize(
    ('files', 'flags', 'words'),
    [
        (['remixer'], [], 'it has no encoder/layer/gated_mlp'),
        (['t5_1_1'], [('LAYOUT', '@layer.PostNorm')], "class of encoder/layer is 'PostNorm', not 'PreNorm'"),
        (['t5_1_1'], [DROPOUT, ('NUM_KV_HEADS', '2')], 'num_kv_heads of encoder/layer/self_attention is 2, not 4'),
        (['t5_1_1'], [BIASES], 'it has a RelativePositionBias as encoder/position_bias'),
        (['t5_1_1'], [('MUP_BASE_WIDTH', '16'), ('TIED_OUTPUT', 'True')], 'base_embed_dim of the model is 16'),
        (
            ['bert', '../sublayers/fnet'],
            FNET,
            'BertForMaskedLM cannot represent this model: it has no encoder.layer.scaled_attention',
        ),
        (['bert'], [('HEAD_DIM', '24')], 'head_dim is 24, but transformers would use 64'),
        (['gpt2'], [('VOCAB_SIZE', '50'), BEGIN], ': config.json sets eos_token_id to 59; it must be less than'),
        (['gpt2'], [('gpt2/feed_forward.GeluMLP.approximate', 'False'), BEGIN], 'approximate of decoder/layer/gelu'),
        (['gpt2'], [], 'GPT2LMHeadModel cannot represent this model: decoder_only.DecoderOnly.begin_id is 0'),
        (['gpt2'], [('PREFIX_LM', 'True'), BEGIN], 'GPT2LMHeadModel cannot represent this model: PREFIX_LM is True'),
    ],
)
def test_a_model_that_hugging_face_lacks_raises_its_difference(files, flags, words):
    model = shipped(*(f'models/{file}.gin'.replace('models/../', '') for file in files), flags=flags)
    message = error_message(hf_folders.describe, model, GPT2_VOCABULARY)
    assert re.search(words, message) and '--to_safetensors' in message
    classifier = types.SimpleNamespace(model_type='classifier')
    message = error_message(hf_folders.describe, classifier, VOCABULARY)
    assert "'classifier'" in message and message.count('T5EncoderModel') == 1


@pytest.mark.parametrize(
    ('name', 'setting', 'value'),
    [
        ('t5_v1_1_tiny', 'model_type', 'longt5'),
        ('t5_v1_1_tiny', 'decoder_start_token_id', 2),
        ('t5_v1_1_tiny', 'eos_token_id', [1, 2]),
        ('t5_v1_1_tiny', 'eos_token_id', 96),
        ('t5_v1_1_tiny', 'tie_word_embeddings', True),
        ('t5_v1_0_tiny', 'layer_norm_epsilon', 1e-5),
        ('bert_tiny', 'position_embedding_type', 'relative_key'),
        ('gpt2_tiny', 'tie_word_embeddings', False),
        ('gpt2_tiny', 'eos_token_id', 60),
        ('t5gemma_tiny', 'query_pre_attn_scalar', 144),
        ('t5gemma_tiny', 'attn_logit_softcapping', 5.0),
        ('t5gemma_tiny', 'layer_types', ['full_attention'] * 2),
        ('t5gemma_tiny', 'rope_parameters', {'rope_type': 'yarn'}),
        ('t5gemma_tiny', 'rope_scaling', {'type': 'linear', 'factor': 2.0}),
    ],
)
def test_an_unsupported_setting_of_config_json_is_named(tmp_path, name, setting, value):
    config = {**CONFIGS[name], setting: value}
    if name == 't5gemma_tiny':
        config = {**CONFIGS[name], 'decoder': {**CONFIGS[name]['decoder'], setting: value}}
    folder = hf_folders.write(tmp_path / 'hf', config, hf_folders.weights(name))
    message = error_message(hf_folders.read_params, folder)
    assert re.search(rf'{setting} to {re.escape(repr(value))}; (it|rope_type) must ', message)


def test_heads_of_any_size_and_default_softcaps_of_t5gemma():
    stack = {name: value for name, value in CONFIGS['t5gemma_tiny']['encoder'].items() if 'softcap' not in name}
    stacks = {side: {**stack, 'head_dim': 24, 'num_hidden_layers': 2} for side in ('encoder', 'decoder')}
    family = T5Gemma.from_config(HuggingFaceConfig(stacks, 'folder'))
    # The defaults of T5GemmaModuleConfig.
    assert (family.softcap, family.final_softcap) == (50.0, 30.0)
    model = conversions.build_model_from_gin(family.build_gin_text('A test.'))
    assert hf_folders.describe(model, VOCABULARY) == family


def test_the_problem_type_of_a_classifier_is_checked():
    config = {'problem_type': 'regression', 'id2label': {'0': 'a', '1': 'b'}}
    message = error_message(lambda: bert.read_label_names(HuggingFaceConfig(config, 'hf')))
    assert "problem_type to 'regression'" in message and 'with 2 labels' in message


def test_the_number_of_sentinels_is_read_from_the_tokenizer(tmp_path):
    folder = hf_folders.write_tiny(tmp_path / 'hf', 't5_v1_0_tiny')
    tokenizer = folder / 'tokenizer_config.json'
    model = str(folder / 'spiece.model')
    expected = ('sentencepiece', {'path': model, 'extra_ids': 10})
    assert t5_tokenizer.find_t5_tokenizer(folder) == expected
    assert t5_tokenizer.find_t5_tokenizer(folder, '/other.model')[1]['path'] == '/other.model'
    names = [f'<extra_id_{i}>' for i in range(7)]
    # ByT5 was pretrained with the last bytes as sentinels.
    byt5 = {'tokenizer_class': 'ByT5Tokenizer', 'extra_ids': 125}
    for config, extra_ids in (({'additional_special_tokens': names}, 7), ({'extra_ids': 0}, 0), (byt5, 0), ({}, 100)):
        tokenizer.write_text(json.dumps(config))
        assert t5_tokenizer.find_t5_tokenizer(folder)[1]['extra_ids'] == extra_ids
    (folder / 'spiece.model').unlink()
    with pytest.raises(UserError, match='--vocabulary'):
        t5_tokenizer.find_t5_tokenizer(folder)


def test_the_separator_of_bert_is_found(tmp_path):
    folder = pathlib.Path(hf_folders.write_tiny(tmp_path / 'hf', 'bert_tiny'))
    (tmp_path / 'vocab.txt').write_bytes('\r\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', 'a']).encode())
    words = error_message(
        lambda: model_folders.open_model_folder(folder).family.find_tokenizer(folder, tmp_path / 'vocab.txt')
    )
    assert 'copy vocab.txt' in words
    shutil.copy(tmp_path / 'vocab.txt', folder)
    family = model_folders.open_model_folder(folder).family
    assert family.separator_id == 3 and family.find_tokenizer(folder, None)[1]['path'] == str(folder / 'vocab.txt')
    (folder / 'vocab.txt').write_text('[PAD]\n[UNK]')
    (folder / 'added_tokens.json').write_text('{"[SEP]": 2}')
    assert model_folders.open_model_folder(folder).family.separator_id == 2


ONES = np.ones(60, np.float32)


@pytest.mark.parametrize(
    ('name', 'changes', 'words'),
    [
        ('t5_v1_1_tiny', {'d_model': 16}, '(32, 32), expected (32, 16) (and 63 more differ)'),
        ('t5_v1_1_tiny', {'num_layers': 3}, 'encoder.block.2'),
        ('t5_v1_1_tiny', {'encoder.embed_tokens.weight': np.zeros((96, 32), np.float32)}, 'differs from shared.weight'),
        ('t5_v1_1_tiny', {'encoder.block.0.layer.0.adapter.weight': ONES}, 'block.0.layer.0.adapter'),
        ('bert_tiny', {'cls.predictions.decoder.bias': ONES}, 'differs from cls.predictions.bias'),
    ],
)
def test_weights_that_do_not_fit_config_json_are_named(tmp_path, name, changes, words):
    """`changes` of the weights, whose names have a dot, or of config.json."""
    contents = {**CONFIGS[name], **hf_folders.weights(name), **changes}
    config = {key: value for key, value in contents.items() if '.' not in key}
    weights = {key: value for key, value in contents.items() if '.' in key}
    folder = hf_folders.write(tmp_path / 'hf', config, weights)
    assert words in error_message(hf_folders.read_params, folder)


def published(name, weights):
    """Returns the weights with the names and the additional arrays of published files."""
    if name == 'bert_tiny':
        old = {'LayerNorm.weight': 'LayerNorm.gamma', 'LayerNorm.bias': 'LayerNorm.beta'}
        renamed = {next((n.replace(a, b) for a, b in old.items() if n.endswith(a)), n): x for n, x in weights.items()}
        table = weights['bert.embeddings.word_embeddings.weight']
        return {**renamed, 'bert.pooler.dense.weight': np.zeros((24, 24)), 'cls.predictions.decoder.weight': table}
    if name == 'gpt2_tiny':
        plain = {weight.removeprefix('transformer.'): array for weight, array in weights.items()}
        return {**plain, 'h.0.attn.bias': ONES, 'h.2.attn.masked_bias': ONES, 'lm_head.weight': plain['wte.weight']}
    table = weights['shared.weight']
    tables = dict.fromkeys(('decoder.embed_tokens.weight', 'encoder.embed_tokens.weight', 'lm_head.weight'), table)
    unread = {'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight': ONES}
    # The table is only stored under the names of the stacks and the output.
    return {**{n: array for n, array in weights.items() if n != 'shared.weight'}, **tables, **unread}


@pytest.mark.parametrize('name', ['t5_v1_0_tiny', 'bert_tiny', 'gpt2_tiny'])
def test_names_and_arrays_of_published_files_are_read(tmp_path, name):
    weights, config = hf_folders.weights(name), CONFIGS[name]
    paths = [hf_folders.write(tmp_path / 'plain', config, weights)]
    paths += [hf_folders.write(tmp_path / 'published', config, published(name, weights))]
    plain, other = (model_folders.open_model_folder(path) for path in paths)
    assert other.family == plain.family
    params = hf_folders.read_params(paths[0])
    assert safetensors_files.find_differing_array(other.read_params(params), params) is None
    assert other.find_differing_weight(params) is None


def test_without_an_output_matrix_a_gated_t5_uses_the_embedding_as_in_transformers_5(tmp_path):
    weights = {name: x for name, x in hf_folders.weights('t5_v1_1_tiny').items() if name != 'lm_head.weight'}
    params = hf_folders.read_params(hf_folders.write(tmp_path / 'hf', hf_folders.V1_1, weights))
    np.testing.assert_array_equal(params['logits']['kernel'].T, params['token_embedder']['embedding'])


def test_a_single_file_of_weights_takes_precedence_over_shards_as_in_transformers(tmp_path):
    folder = hf_folders.write_tiny(tmp_path / 'hf', 't5_v1_1_tiny', shards=2)
    weights = {name: array + 1 for name, array in hf_folders.weights('t5_v1_1_tiny').items()}
    save_file(weights, folder / 'model.safetensors')
    read = model_folders.open_model_folder(folder).tensors['shared.weight']
    np.testing.assert_array_equal(read, weights['shared.weight'])


def test_folders_without_readable_weights_are_rejected(tmp_path):
    def check(words, folder):
        assert re.search(words, error_message(hf_folders.read_params, folder))

    folder = hf_folders.write_tiny(tmp_path / 'shards', 't5_v1_1_tiny', shards=2)
    first, second = (folder / f'model-0000{number}-of-00002.safetensors' for number in (1, 2))
    second.write_bytes(first.read_bytes())
    check('model-00002-of-00002.* cannot be read as safetensors.* does not contain tensor', folder)
    second.unlink()
    check('lacks the shard model-00002-of-00002', folder)
    folder = hf_folders.write_tiny(tmp_path / 'truncated', 't5_v1_1_tiny')
    (folder / 'model.safetensors').write_bytes((folder / 'model.safetensors').read_bytes()[:5000])
    check('cannot be read as safetensors', folder)
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
    check('has neither model.safetensors nor .*AutoModelForSeq2SeqLM.*save_pretrained', folder)
    (folder / 'config.json').write_text('{')
    check('config.json cannot be read', folder)


@pytest.mark.parametrize('tiny', ['bert_tiny'], indirect=True)
def test_hidden_states_and_logits_of_a_bert_equal_recorded_values(tiny):
    arrays, is_token = tiny.arrays, tiny.arrays['inputs'] > 0
    names = ('encoder_input_tokens', 'encoder_token_types')
    batch = dict(zip(names, (arrays['inputs'], arrays['token_types']), strict=True))
    calls = {'hidden': lambda p: tiny.model.encode(p, *batch.values()), 'logits': lambda p: tiny.model.logits(p, batch)}
    for name, call in calls.items():
        ours, theirs = np.asarray(jax.jit(call)(tiny.params))[is_token], arrays[name][is_token]
        assert np.max(np.abs(ours - theirs)) < 1e-5 * np.max(np.abs(theirs))
