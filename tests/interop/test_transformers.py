"""Random models of transformers convert to ours and back bit by bit, and compute the same outputs."""

import dataclasses
import functools
import math
import types

import numpy as np
import pytest
from flax import traverse_util

import remixer_t5x
from remixer_t5x.context import make_sequence_context
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import model_folders
from remixer_t5x.interop.huggingface.model_family import HuggingFaceConfig
from remixer_t5x.interop.huggingface.t5 import T5, SentenceT5
from remixer_t5x.models.architecture import encoder_only
from tests.support import hf_folders

pytestmark = pytest.mark.usefixtures('clean_gin')
REASON = 'torch and transformers are not installed: scripts/test.sh --references'
torch = pytest.importorskip('torch', reason=REASON)
transformers = pytest.importorskip('transformers', reason=REASON)

SMALL_T5 = {'vocab_size': 64, 'd_model': 24, 'd_kv': 8, 'd_ff': 40, 'num_layers': 3, 'num_heads': 2}
SMALL_BERT = {
    'vocab_size': 60, 'hidden_size': 24, 'intermediate_size': 40, 'num_hidden_layers': 3, 'num_attention_heads': 2,
    'max_position_embeddings': 70,
}  # fmt: skip


def gated_t5(name, tied=False, **settings):
    """Returns a function that makes a T5; unless `tied`, which transformers 5 assumes, it has an output matrix."""

    def make():
        sizes = {**SMALL_T5, 'num_decoder_layers': 2, 'decoder_start_token_id': 0, 'tie_word_embeddings': False}
        config = getattr(transformers, f'{name}Config')(**sizes, **settings)
        model = getattr(transformers, f'{name}ForConditionalGeneration')(config)
        if not tied:
            model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 24))
        return model

    return make


def encoder(name, **settings):
    config, model = getattr(transformers, f'{name}Config'), getattr(transformers, f'{name}EncoderModel')
    return functools.partial(model, config(**SMALL_T5, **settings))


def bert_classifier(**settings):
    config = transformers.BertConfig(**SMALL_BERT, **settings)
    return functools.partial(transformers.BertForSequenceClassification, config)


def modern_bert(head, layers=6, **settings):
    config = transformers.ModernBertConfig(
        vocab_size=60, hidden_size=32, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=70, local_attention=16, pad_token_id=3, cls_token_id=1, sep_token_id=2, bos_token_id=1,
        eos_token_id=2, reference_compile=False, **settings,
    )  # fmt: skip
    return functools.partial(getattr(transformers, f'ModernBertFor{head}'), config)


ROPE = {'rope_type': 'default', 'rope_theta': 500.0}


def t5gemma(layers=(4, 4), tied=True, **settings):
    sizes = {
        'vocab_size': 64, 'hidden_size': 32, 'intermediate_size': 40, 'num_attention_heads': 4, 'head_dim': 16,
        'num_key_value_heads': 2, 'query_pre_attn_scalar': 16, 'sliding_window': 5, **settings,
    }  # fmt: skip
    encoder, decoder = ({**sizes, 'num_hidden_layers': count} for count in layers)
    config = transformers.T5GemmaConfig(
        encoder=encoder, decoder=decoder, vocab_size=64, tie_word_embeddings=tied, attn_implementation='eager'
    )
    return functools.partial(transformers.T5GemmaForConditionalGeneration, config)


def gpt2(**settings):
    config = transformers.GPT2Config(vocab_size=60, n_embd=24, n_layer=2, n_head=2, n_positions=20, **settings)
    return functools.partial(transformers.GPT2LMHeadModel, config)


# The special ids are those of `modern_bert`.
VOCABULARY = types.SimpleNamespace(eos_id=1, shifted=True, special_ids_in_file={'pad': 3, 'cls': 1, 'sep': 2})
MODELS = {
    'T5 encoder': encoder('T5'),
    'gated T5 encoder': encoder('T5', feed_forward_proj='gated-gelu'),
    'umT5 encoder': encoder('UMT5', feed_forward_proj='gated-gelu'),
    # As in tokenizers that are trained with the end token as the first token.
    'GPT-2 with an end token of id 0': gpt2(bos_token_id=0, eos_token_id=0),
    'GPT-2 with a start token': gpt2(bos_token_id=5, eos_token_id=0),
    'BERT': functools.partial(transformers.BertForMaskedLM, transformers.BertConfig(**SMALL_BERT)),
    'BERT classifier': bert_classifier(id2label={0: 'no', 1: 'yes', 2: 'maybe'}),
    'BERT regression': bert_classifier(num_labels=1),
    'UL2': gated_t5('T5', feed_forward_proj='gated-silu'),
    'gated T5 of transformers 5': gated_t5('T5', tied=True, feed_forward_proj='gated-gelu'),
    'mT5': gated_t5('MT5', feed_forward_proj='gated-gelu'),
    'T5Gemma': t5gemma(attn_logit_softcapping=1.0, final_logit_softcapping=2.0),
    'T5Gemma, untied, of 3 and 5 layers': t5gemma((3, 5), tied=False, rope_parameters=ROPE),
    'T5Gemma without softcaps': t5gemma((1, 2), attn_logit_softcapping=None, final_logit_softcapping=None),
    'ModernBERT': modern_bert('MaskedLM'),
    'ModernBERT of 4 layers': modern_bert('MaskedLM', 4),
    'ModernBERT, every second layer global': modern_bert('MaskedLM', 5, global_attn_every_n_layers=2),
    'ModernBERT classifier': modern_bert('SequenceClassification', id2label={0: 'a', 1: 'b', 2: 'c'}),
    'ModernBERT regression': modern_bert('SequenceClassification', num_labels=1, classifier_pooling='mean'),
}


def save_random(make, folder):
    """Writes a model with random parameters, including norms and biases."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale, shift = (0.1, 1.0 if 'norm' in name.lower() and name.endswith('weight') else 0.0)
            weight.copy_(torch.randn_like(weight) * scale + shift)
    model.save_pretrained(folder)
    return model


def check_round_trip(source, model, vocabulary, tmp_path):
    family, params = hf_folders.describe(model, vocabulary), hf_folders.read_params(source.folder)
    assert family == source.family
    back = model_folders.open_model_folder(model_folders.write_model_folder(tmp_path / 'back', family, params))
    assert back.family == source.family
    for name in source.tensors:
        assert name in family.copies or np.array_equal(back.tensors[name], source.tensors[name]), name
    return back


PAIRS = [('a text of words', 'the words'), ('words', 'a text'), ('the text', 'of a')]
PIECES = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'text', '##s', 'of', 'the', 'words']


@pytest.mark.parametrize('head', ['SequenceClassification', 'MaskedLM'])
def test_pairs_have_the_ids_and_logits_of_transformers(tmp_path, head):
    config = transformers.BertConfig(**SMALL_BERT, id2label={0: 'no', 1: 'yes', 2: 'maybe'})
    theirs = save_random(functools.partial(getattr(transformers, f'BertFor{head}'), config), tmp_path).eval()
    (tmp_path / 'vocab.txt').write_text('\n'.join([*PIECES, *(f'piece{index}' for index in range(len(PIECES), 60))]))
    (tmp_path / 'tokenizer_config.json').write_text('{"tokenizer_class": "BertTokenizer"}')
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), remixer_t5x.load(str(tmp_path))
    for first, second in PAIRS:
        encoded = tokenizer(first, second, return_tensors='pt')
        ids = np.asarray([[*ours.vocabulary.encode(f'{first} [SEP] {second}'), ours.vocabulary.eos_id]])
        assert ids.tolist() == encoded.input_ids.tolist() and encoded.token_type_ids.sum() > 0
        with torch.no_grad():
            expected = theirs(**encoded).logits.numpy()
        module, params = ours.model.module, {'params': ours.params}
        method = 'classify' if head == 'SequenceClassification' else 'predict_tokens'
        logits = module.apply(params, ids, enable_dropout=False, method=method)
        assert np.max(np.abs(np.asarray(logits) - expected)) < 1e-5
        without_separator = module.clone(separator_id=None).apply(params, ids, enable_dropout=False, method=method)
        assert np.max(np.abs(np.asarray(without_separator) - expected)) > 1e-3


def test_token_types_of_packed_pairs_begin_with_each_example():
    tokens = np.asarray([[2, 5, 3, 6, 3, 2, 7, 8, 3, 9, 3, 0]])
    segments = np.asarray([[1] * 5 + [2] * 6 + [0]])
    types = encoder_only.compute_token_types(tokens, make_sequence_context(tokens, segments), 3)
    assert types.tolist() == [[0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0]]


def test_a_sentence_t5_gives_the_embeddings_of_sentence_transformers(tmp_path):
    reason = 'sentence_transformers is not installed'
    sentence_transformers = pytest.importorskip('sentence_transformers', reason=reason)
    models = pytest.importorskip('sentence_transformers.models', reason=reason)
    save_random(encoder('T5'), tmp_path / 'hf')
    (tmp_path / 'hf/spiece.model').write_bytes(hf_folders.SPIECE.read_bytes())
    transformers.T5Tokenizer.from_pretrained(tmp_path / 'hf', extra_ids=10).save_pretrained(tmp_path / 'hf')
    dense = models.Dense(24, 16, bias=False, activation_function=torch.nn.Identity())
    layers = [models.Transformer(str(tmp_path / 'hf')), models.Pooling(24), dense, models.Normalize()]
    theirs = sentence_transformers.SentenceTransformer(modules=layers)
    theirs.save(str(tmp_path / 'st'))
    (tmp_path / 'st/spiece.model').write_bytes(hf_folders.SPIECE.read_bytes())
    texts = ['a test', 'the words of a longer text', '']
    ours = remixer_t5x.load(str(tmp_path / 'st'))
    assert np.max(np.abs(ours.encode(texts).sentence - theirs.encode(texts))) < 1e-5


def test_a_sentence_t5_is_written_as_it_was_read(tmp_path):
    save_random(encoder('T5'), tmp_path / 'hf')
    family = model_folders.open_model_folder(tmp_path / 'hf').family
    family = SentenceT5(**dataclasses.asdict(family), sentence_dim=16, max_length=32)
    projection = np.random.default_rng(0).standard_normal((24, 16), np.float32)
    params = {
        **hf_folders.read_params(tmp_path / 'hf'),
        'sentence': {'dense': {'kernel': projection}},
    }
    source = model_folders.open_model_folder(model_folders.write_model_folder(tmp_path / 'st', family, params))
    assert source.family == family and np.array_equal(source.tensors['2_Dense/linear.weight'], projection.T)
    model = hf_folders.model_from_source(source, tmp_path)
    check_round_trip(source, model, VOCABULARY, tmp_path)
    # The formula of the paper: the normalized projection of the mean.
    mean = np.random.default_rng(1).standard_normal((3, 24), np.float32)
    expected = mean @ projection / np.linalg.norm(mean @ projection, axis=1, keepdims=True)
    np.testing.assert_allclose(model.project_sentence(hf_folders.read_params(source.folder), mean), expected, atol=1e-6)


def test_a_sentence_t5_of_other_modules_raises_a_one_line_error(tmp_path):
    save_random(encoder('T5'), tmp_path / 'st')
    (tmp_path / 'st/modules.json').write_text('[{"path": "", "type": "a.Transformer"}, {"path": "1", "type": "b.CNN"}]')
    with pytest.raises(UserError, match='Transformer, CNN'):
        model_folders.open_model_folder(tmp_path / 'st')


def test_a_ul2_20b_has_the_names_and_shapes_of_transformers():
    config = transformers.T5Config(
        vocab_size=32128, d_model=4096, d_ff=16384, d_kv=256, num_layers=32, num_heads=16,
        feed_forward_proj='gated-silu', tie_word_embeddings=False, decoder_start_token_id=0,
    )  # fmt: skip
    values = {**config.to_dict(), 'num_decoder_layers': 32}
    family = T5.from_config(HuggingFaceConfig(values, 'memory'))
    assert family.activation == 'silu'
    with torch.device('meta'):
        model = transformers.T5ForConditionalGeneration(config)
    abstract = hf_folders.abstract_params(family)
    ours = traverse_util.flatten_dict(abstract, sep='/')
    rows = [(row.find_huggingface_shape(ours[row.path].shape), row.names) for row in family.map_params(abstract)]
    shapes = {name: shape for shape, names in rows for name in names}
    theirs = {name: tuple(weight.shape) for name, weight in model.state_dict().items() if 'embed_tokens' not in name}
    assert shapes == theirs and sum(map(math.prod, shapes.values())) == 19_591_209_984


@pytest.mark.parametrize('name', MODELS)
def test_outputs_and_files_equal_transformers(name, tmp_path):
    save_random(MODELS[name], tmp_path / 'hf')
    source = model_folders.open_model_folder(tmp_path / 'hf')
    model = hf_folders.model_from_source(source, tmp_path)
    ours, theirs = model_folders.compute_logits_pair(source, model, hf_folders.read_params(source.folder))
    print(f'{name}: n = {theirs.size}, largest difference {np.max(np.abs(ours - theirs)):.2g}')
    assert np.max(np.abs(ours - theirs)) < 1e-4 and np.max(np.abs(theirs)) > 0.01
    back = check_round_trip(source, model, VOCABULARY, tmp_path)
    ours, theirs = model_folders.compute_logits_pair(back, model, hf_folders.read_params(source.folder))
    assert np.max(np.abs(ours - theirs)) < 1e-4
