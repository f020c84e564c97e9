"""Vocabularies that run any tokenizer.json give the ids of transformers, and refuse files that break the library."""

import json
import re

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from remixer_t5x.data import task_vocabulary
from remixer_t5x.errors import UserError
from remixer_tasks import language_modeling, vocabularies
from remixer_tasks.vocabulary import huggingface_tokenizer
from tests.support.error_lines import error_message
from tests.support.untrusted_inputs import ODD_CHARACTERS

LINES = ["## The word of the words, 1,234.50 don't", 'Ça va? Über é 你好 ＷＩＤＥ 😀', 'a\tb\n\n  c'] * 4
SPECIAL = ['<pad>', '</s>', '<s>', '<unk>', '<mask>', '[CLS]', '[SEP]']
FRAGMENTS = [*ODD_CHARACTERS, *SPECIAL, '  ', '\n', 'the ', 'word', '12345']
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.characters(codec='utf-8')).map(''.join)
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def train(model, trainer, **components):
    tokenizer = tokenizers.Tokenizer(model)
    for name, component in components.items():
        setattr(tokenizer, name, component)
    tokenizer.train_from_iterator(LINES, trainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False))
    return tokenizer


def template(tokenizer, *pattern):
    ids = [(token, tokenizer.token_to_id(token)) for token in pattern if token != '$A']
    tokenizer.post_processor = processors.TemplateProcessing(single=' '.join(pattern), special_tokens=ids)
    return tokenizer


def byte_level(*pattern, **components):
    decoder = decoders.ByteLevel()
    return template(train(models.BPE(), trainers.BpeTrainer, decoder=decoder, **components), *pattern)


def byte_fallback(pre_tokenizer=None, *normalizer):
    tokenizer = train(
        models.BPE(unk_token='<unk>', byte_fallback=True, fuse_unk=True),
        lambda special_tokens, **settings: trainers.BpeTrainer(
            special_tokens=[*special_tokens, *(f'<0x{byte:02X}>' for byte in range(256))], **settings
        ),
        normalizer=normalizers.Sequence([*normalizer, normalizers.Replace(' ', '▁')]),
        decoder=decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse()]),
    )
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    return template(tokenizer, '<s>', '$A')


TOKENIZERS = {
    'llama': lambda: byte_fallback(None, normalizers.Prepend('▁')),
    'gemma': lambda: byte_fallback(pre_tokenizers.Split(' ', 'merged_with_previous')),
    'llama_3': lambda: byte_level(
        *('<s>', '$A'),
        pre_tokenizer=pre_tokenizers.Sequence([
            pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), 'isolated'),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]),
    ),
    'modernbert': lambda: byte_level(
        *('[CLS]', '$A', '[SEP]'), normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizers.ByteLevel(False)
    ),
    'albert': lambda: template(
        train(
            models.Unigram(), lambda **settings: trainers.UnigramTrainer(unk_token='<unk>', **settings),
            normalizer=normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
            pre_tokenizer=pre_tokenizers.Metaspace(), decoder=decoders.Metaspace(),
        ), *('[CLS]', '$A', '[SEP]'),
    ),
    'word_piece': lambda: train(
        models.WordPiece(unk_token='<unk>'), trainers.WordPieceTrainer, normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)]),
        decoder=decoders.WordPiece(),
    ),
}  # fmt: skip


@pytest.mark.parametrize(('name', 'shifted'), [*((name, False) for name in TOKENIZERS), ('llama_3', True)])
def test_ids_equal_transformers(tmp_path, name, shifted):
    transformers = pytest.importorskip('transformers', reason='transformers is not installed')
    TOKENIZERS[name]().save(str(tmp_path / 'tokenizer.json'))
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '</s>', 'clean_up_tokenization_spaces': False}
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    ours = vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json'), shifted=shifted)
    end = '[SEP]' if name in ('modernbert', 'albert') else '</s>'
    assert ours.eos_id == theirs.convert_tokens_to_ids(end) + shifted

    @settings(max_examples=300, deadline=None)
    @given(TEXTS)
    def check_ids(text):
        ids = [index + shifted for index in theirs(text).input_ids]
        ids = ids[:-1] if end == '[SEP]' else ids
        assert list(ours.encode(text)) == [index for index in ids if index]
        if ours.eos_id not in ids:
            # seqio's vocabularies end a text at the end token.
            assert ours.decode(ids) == theirs.decode([index - shifted for index in ids], skip_special_tokens=True)

    check_ids()
    assert task_vocabulary.save_vocabulary(ours, tmp_path / 'saved')
    saved = vocabularies.saved(str(tmp_path / 'saved'))
    assert saved == ours and saved.eos_id == ours.eos_id and saved.encode('The 你 word') == ours.encode('The 你 word')


@pytest.mark.parametrize('pattern', [('</s>', '$A'), ('</s>', '$A', '</s>')])
@pytest.mark.parametrize('shifted', [False, True])
def test_a_start_token_that_is_the_end_token_is_omitted(tmp_path, pattern, shifted):
    template(TOKENIZERS['gemma'](), *pattern).save(str(tmp_path / 'tokenizer.json'))
    ours = vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json'), end='</s>', shifted=shifted)
    ids = ours.encode('The word')
    assert ours.bos_id is None and ours.eos_id not in ids and ours.decode([*ids, ours.eos_id]) == 'The word'


@pytest.mark.parametrize('name', ['llama_3', 'gemma'])
def test_token_bytes_add_up_to_the_text(tmp_path, name):
    tokenizer = TOKENIZERS[name]()
    tokenizer.add_tokens(['déjà'])
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    ours = vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json'), end='</s>')
    text = '## The word 你好 😀 déjà 12'
    assert sum(task_vocabulary.count_bytes_per_token(ours)[ours.encode(text)]) == len(text.encode())
    assert b''.join(ours.token_texts[index] for index in ours.encode(text)) == text.encode()


def test_end_and_padding_without_a_flag_have_no_text(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.WordLevel({'<pad>': 0, 'END': 1, '<unk>': 2, 'a': 3, 'b': 4}, '<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    ours = vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json'), end='END')
    assert ours.decode([3, 4, 1, 0, 0]) == ours.decode([3, 0, 4]) == 'a b'
    assert [ours.token_texts[index] for index in (0, 1, 3)] == [b'', b'', b'a']
    assert {0, 1} <= {*ours.special_ids}


def test_texts_of_word_piece_include_the_space_before_a_word(tmp_path):
    (tmp_path / 'vocab.txt').write_text('[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n##b')
    assert vocabularies.wordpiece(str(tmp_path / 'vocab.txt')).token_texts == [b''] * 5 + [b' a', b'b']


@pytest.mark.parametrize('name', TOKENIZERS)
def test_whole_words_of_every_tokenizer(tmp_path, name):
    TOKENIZERS[name]().save(str(tmp_path / 'tokenizer.json'))
    ours = vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json'), end='</s>')
    # The trained tokenizers split these words into several pieces.
    ids = ours.encode('wor tor wod')
    first_of_words = np.flatnonzero(language_modeling.find_word_starts(ours)[ids])
    texts = [ours.token_texts[index] for index in ids]
    words = [b''.join(part).strip() for part in np.split(np.array(texts, object), first_of_words)]
    assert [word for word in words if word] == [b'wor', b'tor', b'wod'] and len(ids) > 5


def test_whole_words_of_a_tokenizer_without_word_starts_are_rejected(tmp_path):
    tokenizer = train(models.BPE(), trainers.BpeTrainer, pre_tokenizer=pre_tokenizers.Whitespace())
    tokenizer.save(str(tmp_path / 'tokenizer.json'))
    ours = vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json'), end='</s>')
    assert 'WHOLE_WORDS = False' in error_message(lambda: language_modeling.find_word_starts(ours))


def set_component(name, value):
    def change(content):
        content[name] = value
        return content

    return change


def set_in_model(name, value):
    return lambda content: content['model'].__setitem__(name, value) or content


SEQUENCE = '{"type": "Sequence", "normalizers": ['
REGEX = {'type': 'Split', 'pattern': {'Regex': '(a+)+$'}, 'behavior': 'Isolated', 'invert': False}
HOSTILE = {
    'unknown normalizer': (
        set_component('normalizer', {'type': 'Precompiled', 'precompiled_charsmap': 'A'}),
        'normalizer',
    ),
    'slow regex': (set_component('pre_tokenizer', REGEX), r'\(a\+\)\+\$'),
    'deep sequences': (set_component('normalizer', json.loads(SEQUENCE * 20 + ']}' * 20)), 'normalizer'),
    'huge prefix': (set_component('normalizer', {'type': 'Prepend', 'prepend': 'a' * 10**6}), 'prepend'),
    'huge id': (set_in_model('vocab', {'a': 2**40}), '1099511627776'),
    'random merges': (set_in_model('dropout', 0.5), 'dropout'),
    'invalid merges': (set_in_model('merges', [['x', 'y']]), 'cannot be read as a tokenizer'),
    'a list': (lambda content: [content], 'JSON object'),
}


@pytest.mark.parametrize('kind', HOSTILE)
def test_a_hostile_file_raises_a_one_line_error(tmp_path, kind):
    change, words = HOSTILE[kind]
    file = tmp_path / 'tokenizer.json'
    TOKENIZERS['gemma']().save(str(file))
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert re.search(words, error_message(lambda: vocabularies.huggingface_tokenizer(str(file)).vocab_size))


def test_padding_and_truncation_of_a_file_are_not_run(tmp_path):
    file, tokenizer = tmp_path / 'tokenizer.json', TOKENIZERS['gemma']()
    tokenizer.enable_padding(length=2**20)
    tokenizer.enable_truncation(1)
    tokenizer.save(str(file))
    assert len(vocabularies.huggingface_tokenizer(str(file), end='</s>').encode('word word')) > 3


def test_a_file_that_hangs_the_library_raises_a_one_line_error(tmp_path, monkeypatch):
    TOKENIZERS['gemma']().save(str(tmp_path / 'tokenizer.json'))
    monkeypatch.setattr(huggingface_tokenizer, 'TIME_LIMIT', 0.01)
    with pytest.raises(UserError, match='more than 0.01 seconds'):
        vocabularies.huggingface_tokenizer(str(tmp_path / 'tokenizer.json')).vocab_size  # noqa: B018
