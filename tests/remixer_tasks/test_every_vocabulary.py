"""All vocabularies with all objectives: exact positions, and equal ids in training and inference."""

import functools
import io
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
import seqio
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from remixer_t5x import base_vocabulary, lazy_imports
from remixer_t5x.data import batch_formats, pipeline, task_batches, task_vocabulary
from remixer_tasks import language_modeling, pretraining, text_pairs, vocabularies
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.vocabulary import huggingface_tokenizer
from tests.support import hf_folders
from tests.support.error_lines import error_message
from tests.support.paths import environment

LINES = [f'The word {number * 7919 % 997} stands next to {number % 7}, and nothing else.' for number in range(400)]
WORDS = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'the', 'word', 'stands', 'next', 'to', ',', 'and', 'nothing']
WORDS += ['else', '.', *'0123456789', *(f'##{digit}' for digit in '0123456789')]
TEXTS = st.text(max_size=30) | st.lists(
    st.sampled_from(['<extra_id_0>', '<extra_id_9>', '(', 'the', ' ', 'x', '</s>', '\n', '\ufeff', '\x1c', 'é', "'s"])
).map(''.join)


def corpus():
    return ParsedCorpus('lines', 'lines of every vocabulary', lambda malformed: iter(LINES))


def pairs():
    rows = [text_pairs.encode_pair(line, 'yes' if index % 2 else 'no') for index, line in enumerate(LINES)]
    return ParsedCorpus('pairs', 'pairs of every vocabulary', lambda malformed: iter(rows))


def write_mt5(folder) -> str:
    """Writes a model whose last pieces are the sentinels, as in mT5."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=file, vocab_size=60, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    proto = sentencepiece_model_pb2.ModelProto.FromString(file.getvalue())
    for index in reversed(range(100)):
        proto.pieces.add(piece=f'▁<extra_id_{index}>', score=0.0, type=proto.SentencePiece.USER_DEFINED)
    (folder / 'mt5.model').write_bytes(proto.SerializeToString())
    return str(folder / 'mt5.model')


def write_gpt2(folder) -> str:
    pieces = [*huggingface_tokenizer.list_byte_characters(), 'th', 'Ġth', 'the', '<|endoftext|>', '<|user|>']
    hf_folders.write_byte_pairs(folder, pieces, ['t h', 'Ġ th', 'th e'], '<|endoftext|>', '<|user|>')
    return str(folder / 'tokenizer.json')


def write_bert(folder) -> str:
    (folder / 'vocab.txt').write_text('\n'.join(WORDS))
    return str(folder / 'vocab.txt')


VOCABULARIES = {
    'sentencepiece': lambda folder: vocabularies.trained(corpus(), 228, at_most=True),
    'bytes': lambda folder: vocabularies.byte(),
    'words': lambda folder: vocabularies.words(corpus()),
    'wordpiece': lambda folder: vocabularies.wordpiece(write_bert(folder)),
    'gpt2': lambda folder: vocabularies.huggingface_tokenizer(write_gpt2(folder), '<|endoftext|>', shifted=True),
    'mt5': lambda folder: vocabularies.sentencepiece(write_mt5(folder), extra_ids=0),
    'byt5': lambda folder: vocabularies.byte(extra_ids=0),
}
BOTH = {'inputs': 48, 'targets': 48}
# Task and lengths.
OBJECTIVES = {
    'span_corruption': (pretraining.span_corruption, BOTH),
    'prefix_lm': (pretraining.prefix_lm, BOTH),
    'ul2': (
        functools.partial(pretraining.ul2, denoisers=[('r', 3, 0.15, 1), ('s', None, 0.25, 1)]),
        {'inputs': 60, 'targets': 60},
    ),
    'causal_lm': (pretraining.causal_lm, {'targets': 48}),
    'masked_lm': (pretraining.masked_lm, BOTH),
}
# All objectives, and for each vocabulary those that use its special ids.
CASES = [
    ('bytes', 'prefix_lm', 'decoder_only'),
    ('bytes', 'ul2', 'encoder_decoder'),
    ('sentencepiece', 'masked_lm', 'encoder_only'),
    ('mt5', 'span_corruption', 'encoder_decoder'),
    ('byt5', 'span_corruption', 'decoder_only'),
    ('words', 'span_corruption', 'encoder_decoder'),
    ('wordpiece', 'masked_lm', 'encoder_only'),
    ('gpt2', 'ul2', 'encoder_decoder'),
    ('gpt2', 'causal_lm', 'decoder_only'),
]


@pytest.fixture(scope='module')
def get_vocabulary(tmp_path_factory):
    """Returns a function that builds a vocabulary by name."""

    @functools.cache
    def make(name):
        return VOCABULARIES[name](tmp_path_factory.mktemp(name))

    return make


@pytest.mark.parametrize(('name', 'objective', 'model_type'), CASES)
def test_an_objective_has_exact_positions_or_is_rejected(get_vocabulary, name, objective, model_type):
    vocabulary, (task, lengths) = get_vocabulary(name), OBJECTIVES[objective]
    config = pipeline.DatasetConfig(lambda: task(corpus(), vocabulary), lengths, 4, model_type=model_type)
    if (name, objective) in (('words', 'span_corruption'), ('gpt2', 'ul2')):
        assert 'use a SentencePiece or byte vocabulary' in error_message(
            lambda: next(task_batches.TrainBatches(config))
        )
        return
    batches, restored = task_batches.TrainBatches(config), task_batches.TrainBatches(config)
    batch = next(batches)
    restored.restore_states(batches.capture_states())
    second = next(batches)
    for array_name, array in next(restored).items():
        np.testing.assert_array_equal(array, second[array_name])
    side = 'encoder' if model_type == batch_formats.ENCODER_ONLY else 'decoder'
    targets, weights = batch[f'{side}_target_tokens'], batch[f'{side}_loss_weights']
    assert not np.any(weights[targets == 0]), 'padding has no weight'
    if objective == 'causal_lm':
        assert np.all(weights[targets == vocabulary.eos_id])
    if objective == 'prefix_lm':
        # The end token of the inputs is not predicted.
        assert np.sum(weights[targets == vocabulary.eos_id]) == len(targets)


@pytest.mark.parametrize(
    ('name', 'model_type'),
    [
        *((name, 'decoder_only') for name in ('sentencepiece', 'wordpiece')),
        *(('gpt2', 'encoder_decoder'), ('words', 'classifier')),
    ],
)
def test_the_end_of_an_answer_has_a_weight(get_vocabulary, name, model_type):
    vocabulary = get_vocabulary(name)
    lengths, labels = {'inputs': 80, 'targets': 8}, ('no', 'yes')
    task = text_pairs.task(pairs(), vocabulary)
    config = pipeline.DatasetConfig(task, lengths, 4, model_type=model_type, labels=labels)
    batch = next(task_batches.TrainBatches(config))
    if model_type == 'classifier':
        assert set(batch['labels']) <= {0.0, 1.0}
        return
    targets, weights = batch['decoder_target_tokens'], batch['decoder_loss_weights']
    for row, weight in zip(targets, weights, strict=True):
        ids = row[weight > 0].tolist()
        assert ids in [[*vocabulary.encode(answer), vocabulary.eos_id] for answer in ('no', 'yes')]


@pytest.mark.parametrize('name', VOCABULARIES)
def test_training_and_inference_give_the_same_ids(get_vocabulary, name):
    vocabulary = get_vocabulary(name)
    encode_tf = tf.function(vocabulary.encode_tf, input_signature=[tf.TensorSpec([], tf.string)])

    @settings(max_examples=60)
    @given(TEXTS)
    @example('\x00')
    @example('the\x00\x00')
    def check_ids(text):
        ids = encode_tf(text).numpy()
        assert ids.tolist() == list(vocabulary.encode(text)) and 0 not in ids

    check_ids()
    if name == 'bytes':
        # Invalid UTF-8 is replaced with U+FFFD before encoding.
        for text in (b'a\xffb', b'a\xffb <extra_id_1>', b'the \xe4\xbd'):
            assert encode_tf(text).numpy().tolist() == vocabulary.encode(text.decode(errors='replace'))


@pytest.mark.parametrize('name', ['sentencepiece', 'bytes', 'mt5', 'byt5'])
def test_ids_and_texts_equal_those_of_seqio(get_vocabulary, name):
    ours = get_vocabulary(name)
    if hasattr(ours, 'sp_model'):
        theirs = seqio.SentencePieceVocabulary(ours.sentencepiece_model_file, ours.extra_ids)
        assert ours.sp_model == theirs.sp_model
    else:
        theirs = seqio.ByteVocabulary(ours.extra_ids)
    for attribute in ('vocab_size', 'extra_ids', 'pad_id', 'bos_id', 'eos_id', 'unk_id'):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute

    @settings(max_examples=100)
    @given(TEXTS, st.lists(st.integers(0, ours.vocab_size + 9), max_size=12))
    @example('\x00 \t\u2581\u3000the  \u0301', [5, ours.eos_id, 6])
    @example('', [0, ours.unk_id, ours.vocab_size, ours.vocab_size - 1])
    def check_ids(text, ids):
        # seqio finds a sentinel only after a space.
        if '<extra_id_' not in text:
            assert ours.encode(text) == list(theirs.encode(text))
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode_tf(np.asarray([ids, ids], np.int32)).numpy().tolist() == [theirs.decode(ids).encode()] * 2

    check_ids()


@pytest.mark.parametrize('name', VOCABULARIES)
def test_a_saved_vocabulary_gives_the_same_ids_without_its_sources(name, tmp_path, monkeypatch):
    (tmp_path / 'source').mkdir()
    vocabulary = VOCABULARIES[name](tmp_path / 'source')
    texts = ['the word 17 stands', 'the  unknown', '', 'x']
    ids, record = [vocabulary.encode(text) for text in texts], task_vocabulary.get_vocabulary_record(vocabulary)
    assert task_vocabulary.save_vocabulary(vocabulary, tmp_path / 'run/vocabulary')
    shutil.rmtree(tmp_path / 'source')
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'empty'))
    shutil.move(tmp_path / 'run', tmp_path / 'moved')
    for folder in ('moved', 'moved/vocabulary'):
        restored = vocabularies.saved(str(tmp_path / folder))
        assert task_vocabulary.get_vocabulary_record(restored) == record and restored.eos_id == vocabulary.eos_id
        assert [restored.encode(text) for text in texts] == ids
        assert [restored.encode_tf(text).numpy().tolist() for text in texts] == ids
        assert [restored.decode(row) for row in ids] == [vocabulary.decode(row) for row in ids]
    assert not (tmp_path / 'empty').exists()


def test_custom_vocabularies_with_different_ids_have_different_records(tmp_path):
    customs = [seqio.UnigramVocabulary(list(letters)) for letters in ('abc', 'acb', 'abcd')]
    assert len({task_vocabulary.get_vocabulary_record(custom) for custom in customs}) == 3
    assert not task_vocabulary.save_vocabulary(customs[0], tmp_path / 'vocabulary')


def test_a_process_without_tensorflow_computes_the_same_ids(get_vocabulary, tmp_path):
    texts, ids = ['the word <extra_id_3>é', '', '\x00 stands (next)', "1's\n"], [5, 9, 20, 1, 7]
    names = list(VOCABULARIES)
    for name in names:
        assert task_vocabulary.save_vocabulary(get_vocabulary(name), tmp_path / name)
    program = f"""if True:
        import json, sys
        sys.modules.update(dict.fromkeys({lazy_imports.TASK_LIBRARIES!r}))
        from remixer_tasks import vocabularies
        saved = [vocabularies.saved(f'{tmp_path}/{{name}}') for name in {names!r}]
        print(json.dumps([[[v.encode(text) for text in {texts!r}], v.decode({ids!r})] for v in saved]))
    """
    command = [sys.executable, '-c', program]
    output = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == [
        [[get_vocabulary(name).encode(text) for text in texts], get_vocabulary(name).decode(ids)] for name in names
    ]


@pytest.mark.parametrize(('name', 'count'), [('sentencepiece', 100), ('mt5', 100), ('byt5', 11), ('words', 0)])
def test_sentinels_have_no_bytes(get_vocabulary, name, count):
    """All other pieces of a text have the bytes of the text."""
    vocabulary = get_vocabulary(name)
    counts = task_vocabulary.count_bytes_per_token(vocabulary)
    text = 'the é' if 'byt' in name else 'stands'
    assert counts[vocabulary.encode(text)].sum() == len(text.encode()) + ('byt' not in name)
    assert not counts[len(counts) - count :].any() and counts[len(counts) - count - 1]
    if name != 'words':
        names = [f'<extra_id_{index}>' for index in reversed(range(count))]
        assert task_vocabulary.list_pieces(vocabulary)[len(counts) - count :] == names


@pytest.mark.parametrize('name', ['sentencepiece', 'bytes', 'byt5'])
def test_a_sentinel_is_found_next_to_any_character(get_vocabulary, name):
    vocabulary = get_vocabulary(name)
    first, _ = base_vocabulary.find_sentinel_range(vocabulary)
    for text in ('the <extra_id_0> word', 'the(<extra_id_0>)', 'un<extra_id_0>able', 'a,<extra_id_0>\n'):
        assert list(vocabulary.encode(text)).count(first) == 1, text
    assert vocabulary.encode('<extra_id_0><extra_id_3>') == [first, first - 3]


def test_a_model_with_other_padding_or_its_own_sentinels_is_rejected(tmp_path):
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=file, vocab_size=60, minloglevel=2, pad_id=3, unk_id=0
    )
    (tmp_path / 'a.model').write_bytes(file.getvalue())
    for path, extra_ids, words in (
        (str(tmp_path / 'a.model'), 100, 'id 0 must be padding'),
        (write_mt5(tmp_path), 3, 'extra_ids must be 0'),
    ):
        assert words in error_message(lambda: vocabularies.sentencepiece(path, extra_ids).vocab_size)  # noqa: B023


def test_added_tokens_of_gpt2_are_single_tokens(get_vocabulary):
    vocabulary = get_vocabulary('gpt2')
    assert vocabulary.encode('<|user|>th<|endoftext|>') == [261, 257, 260]
    assert vocabulary.decode([261, 257]) == '<|user|>th' and vocabulary.vocab_size == 262


@pytest.mark.parametrize('pieces', [['!', '<|endoftext|>'], ['<|endoftext|>', '!']])
def test_a_tokenizer_without_padding_must_be_shifted(tmp_path, pieces):
    """Otherwise, the piece with id 0 would be removed from texts, or the end token would have no weight."""
    hf_folders.write_byte_pairs(tmp_path, pieces, [], '<|endoftext|>')
    vocabulary = vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json'), '<|endoftext|>')
    assert 'shifted = True' in error_message(lambda: vocabulary.eos_id)


def test_an_end_token_is_not_used_as_a_mask(tmp_path):
    hf_folders.write_byte_pairs(tmp_path, ['a', '<|endoftext|>'], [], '<|endoftext|>')
    vocabulary = vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json'), '<|endoftext|>', shifted=True)
    assert 'needs a mask token' in error_message(language_modeling.get_mask_id, vocabulary)
