"""Random models of transformers convert to ours and back bit by bit, and compute the same outputs."""

import functools
import types

import gin
import numpy as np
import pytest

from remixer_t5x import build_model
from remixer_t5x.interop.huggingface import folders as huggingface

REASON = 'torch and transformers are not installed: scripts/test.sh --references'
torch = pytest.importorskip('torch', reason=REASON)
transformers = pytest.importorskip('transformers', reason=REASON)

SMALL_T5 = {'vocab_size': 64, 'd_model': 24, 'd_kv': 8, 'd_ff': 40, 'num_layers': 3, 'num_heads': 2}
SMALL_BERT = {
    'vocab_size': 60, 'hidden_size': 24, 'intermediate_size': 40, 'num_hidden_layers': 3, 'num_attention_heads': 2,
    'max_position_embeddings': 70,
}  # fmt: skip


def encoder(name, **settings):
    config, model = getattr(transformers, f'{name}Config'), getattr(transformers, f'{name}EncoderModel')
    return functools.partial(model, config(**SMALL_T5, **settings))


def bert_classifier(**settings):
    config = transformers.BertConfig(**SMALL_BERT, **settings)
    return functools.partial(transformers.BertForSequenceClassification, config)


MODELS = {
    'T5 encoder': encoder('T5'),
    'gated T5 encoder': encoder('T5', feed_forward_proj='gated-gelu'),
    'umT5 encoder': encoder('UMT5', feed_forward_proj='gated-gelu'),
    'BERT classifier': bert_classifier(id2label={0: 'no', 1: 'yes', 2: 'maybe'}),
    'BERT regression': bert_classifier(num_labels=1),
}


@pytest.fixture(autouse=True)
def _clean_gin():
    yield
    gin.clear_config()


def save_random(make, folder):
    """Writes a model whose parameters, also norms and biases, are random."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale, shift = (0.1, 1.0 if 'norm' in name.lower() and name.endswith('weight') else 0.0)
            weight.copy_(torch.randn_like(weight) * scale + shift)
    model.save_pretrained(folder)
    return model


def build(source, tmp_path):
    (tmp_path / 'model.gin').write_text(source.family.gin_text('A test.'))
    return build_model(str(tmp_path / 'model.gin'))


def check_round_trip(source, model, vocabulary, tmp_path):
    family, runs = huggingface.describe(model, vocabulary)
    assert family == source.family
    back = huggingface.read(str(huggingface.write(str(tmp_path / 'back'), family, source.params(), runs)))
    assert back.family == source.family
    for name in source.tensors:
        assert name in family.copies or np.array_equal(back.tensors[name], source.tensors[name]), name


@pytest.mark.parametrize('name', MODELS)
def test_outputs_and_files_equal_transformers(name, tmp_path):
    save_random(MODELS[name], tmp_path / 'hf')
    source = huggingface.read(str(tmp_path / 'hf'))
    model = build(source, tmp_path)
    ours, theirs = huggingface.both_logits(source, model, source.params())
    print(f'{name}: n = {theirs.size}, largest difference {np.max(np.abs(ours - theirs)):.2g}')
    assert np.max(np.abs(ours - theirs)) < 1e-4 and np.max(np.abs(theirs)) > 0.01
    check_round_trip(source, model, types.SimpleNamespace(eos_id=1), tmp_path)
