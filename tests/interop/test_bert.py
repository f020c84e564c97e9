"""Hugging Face's BERT computes the same on both sides."""

import gin
import jax
import numpy as np
import pytest

from remixer_t5x.interop.huggingface.bert import Bert
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


def test_hidden_states_are_the_recorded_ones(tmp_path):
    arrays, bert = bert_tiny.recorded(), of_config()
    params = bert.read(tensors_of(bert_tiny.write(tmp_path / 'bert')), FOLDER)
    hidden = jax.jit(bert_tiny.model().encode)(params, arrays['inputs'], arrays['token_types'])
    real = arrays['inputs'] > 0
    assert difference(np.asarray(hidden)[real], arrays['hidden'][real]) < 1e-5


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
