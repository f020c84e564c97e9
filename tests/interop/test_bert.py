"""Weights of Hugging Face's BERT become ours and theirs again, bit by bit, and compute the same on both sides."""

import gin
import jax
import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.bert import TABLE, Bert
from remixer_t5x.interop.huggingface.family import Config
from remixer_t5x.interop.safetensors import files as safetensors_files
from tests.support import bert_tiny, references

FOLDER = 'a folder'


@pytest.fixture(autouse=True)
def _clean_gin():
    yield
    gin.clear_config()


def of_config(**changed):
    return Bert.from_config(Config({**bert_tiny.CONFIG, **changed}, FOLDER), {})


def tensors_of(folder):
    return safetensors_files.read_folder(folder)


def difference(ours, theirs):
    return np.max(np.abs(np.asarray(ours) - theirs)) / np.max(np.abs(theirs))


def test_hidden_states_and_logits_are_the_recorded_ones(tmp_path):
    arrays, bert = bert_tiny.recorded(), of_config()
    params = bert.read(tensors_of(bert_tiny.write(tmp_path / 'bert')), FOLDER)
    model = bert_tiny.model()
    batch = {'encoder_input_tokens': arrays['inputs'], 'encoder_token_types': arrays['token_types']}
    hidden = jax.jit(model.encode)(params, *batch.values())
    logits = jax.jit(model.logits)(params, batch)
    real = arrays['inputs'] > 0
    assert difference(np.asarray(hidden)[real], arrays['hidden'][real]) < 1e-5
    assert difference(np.asarray(logits)[real], arrays['logits'][real]) < 1e-5


def test_the_parameters_are_those_of_our_model(tmp_path):
    params = of_config().read(tensors_of(bert_tiny.write(tmp_path / 'bert')), FOLDER)
    shapes = {'encoder_input_tokens': (1, 4)}
    ours = jax.eval_shape(lambda key: bert_tiny.model().init(key, shapes), jax.random.key(0))
    named = {jax.tree_util.keystr(p[:-1]): leaf.shape for p, leaf in jax.tree_util.tree_leaves_with_path(ours)}
    found = {jax.tree_util.keystr(p): leaf.shape for p, leaf in jax.tree_util.tree_leaves_with_path(params)}
    assert found == named


@pytest.mark.parametrize('runs', [None, (1, 2)], ids=['one run', 'two runs'])
def test_the_way_back_gives_the_same_bits(tmp_path, runs):
    bert = of_config()
    params = bert.read(tensors_of(bert_tiny.write(tmp_path / 'bert')), FOLDER)
    if runs:
        stacked, start = params['encoder'].pop('run_0'), 0
        for index, count in enumerate(runs):
            part = jax.tree.map(lambda leaf, s=start, n=count: leaf[s : s + n], stacked)
            params['encoder'][f'run_{index}'] = part
            start += count
    written = bert.write(params, {'encoder': runs or (3,)})
    assert set(written) == set(bert_tiny.weights())
    for name, array in bert_tiny.weights().items():
        assert np.array_equal(written[name], array), name


def test_published_names_and_heads_are_read(tmp_path):
    weights = bert_tiny.weights()
    old = {name.replace('LayerNorm.weight', 'LayerNorm.gamma').replace('LayerNorm.bias', 'LayerNorm.beta'): array
           for name, array in weights.items() if 'LayerNorm' in name}  # fmt: skip
    gone = dict.fromkeys(name for name in weights if 'LayerNorm' in name)
    extra = {
        'bert.pooler.dense.weight': np.zeros((24, 24), np.float32),
        'cls.predictions.decoder.weight': weights[TABLE],
    }
    folder = bert_tiny.write(tmp_path / 'bert', **gone, **old, **extra)
    found = of_config().read(tensors_of(folder), FOLDER)
    np.testing.assert_array_equal(found['input']['norm']['scale'], weights['bert.embeddings.LayerNorm.weight'])


@pytest.mark.parametrize(
    ('config', 'weights', 'words'),
    [
        ({'hidden_act': 'relu'}, {}, "hidden_act 'relu'; it must be 'gelu'"),
        ({'position_embedding_type': 'relative_key'}, {}, 'position_embedding_type'),
        ({'num_attention_heads': 5}, {}, 'num_attention_heads 5; it must divide'),
        ({}, {'cls.predictions.bias': None}, 'lacks the weight cls.predictions.bias; give a whole BertForMaskedLM'),
        ({'hidden_size': 26}, {}, 'has shape'),
        ({}, {'bert.more.weight': np.ones(3, np.float32)}, 'which a BertForMaskedLM of its config.json does not'),
        ({}, {'cls.predictions.decoder.bias': np.ones(60, np.float32)}, 'is not cls.predictions.bias'),
    ],
    ids=['activation', 'positions', 'heads', 'missing', 'shape', 'extra', 'untied'],
)
def test_what_is_no_bert_is_refused_in_one_line(tmp_path, config, weights, words):
    folder = bert_tiny.write(tmp_path / 'bert', **weights)
    with pytest.raises(UserError, match=words) as raised:
        of_config(**config).read(tensors_of(folder), FOLDER)
    assert '\n' not in str(raised.value)


def test_transformers_reads_what_we_write(tmp_path):
    references.need('torch', 'transformers')
    import torch
    import transformers

    bert, arrays = of_config(), bert_tiny.recorded()
    read = bert.read(tensors_of(bert_tiny.write(tmp_path / 'bert')), FOLDER)
    folder = bert_tiny.write(tmp_path / 'ours', bert.to_config(), **bert.write(read, bert.one_run()))
    theirs = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    inputs = torch.from_numpy(arrays['inputs']).long()
    with torch.no_grad():
        found = theirs(input_ids=inputs, token_type_ids=torch.from_numpy(arrays['token_types']).long(),
                       attention_mask=(inputs > 0).long()).logits.numpy()  # fmt: skip
    np.testing.assert_allclose(found, arrays['logits'], atol=1e-5)
    # The published sizes, by the library's own count.
    with torch.device('meta'):
        base = transformers.BertForMaskedLM(transformers.BertConfig())
    assert sum(weight.numel() for weight in base.parameters()) == 109_514_298
