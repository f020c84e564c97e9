"""Our vocabularies give the ids of Hugging Face's tokenizers for any text."""

import io
import json
import shutil

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import model_folders, t5_tokenizer, tokenizer_export
from remixer_t5x.interop.huggingface.bert import Bert
from remixer_t5x.interop.huggingface.gpt2 import Gpt2
from remixer_t5x.interop.huggingface.t5 import T5
from remixer_tasks import vocabularies
from tests.remixer_tasks import test_every_vocabulary as every
from tests.support.untrusted_inputs import ODD_CHARACTERS

transformers = pytest.importorskip('transformers', reason='transformers is not installed: scripts/test.sh --references')
pytestmark = pytest.mark.filterwarnings('ignore')

TOKENS = [
    *('<extra_id_0>', '<extra_id_9>', '(', ')', '  ', '\n', '\t'),
    *('the', 'The', ' th', 'word', '7', ',', '.', '<|user|>'),
]
# Unassigned characters differ between versions of Unicode. transformers normalizes clusters of a letter and its marks
# or skin tones, and drops marks that SentencePiece keeps, as in 'é\u1a65'.
CATEGORIES = ['Cs', 'Cn', 'Co', 'Mn', 'Mc', 'Me']
SKIN_TONES = ''.join(map(chr, range(0x1F3FB, 0x1F400)))
CHARACTERS = st.characters(codec='utf-8', exclude_categories=CATEGORIES, exclude_characters=SKIN_TONES)
TEXTS = st.lists(st.sampled_from([*ODD_CHARACTERS, *TOKENS]) | CHARACTERS)
SPECIAL = {'eos_token': '</s>', 'unk_token': '<unk>', 'pad_token': '<pad>'}
BERT = {'tokenizer_class': 'BertTokenizer'}


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
    return folder


def t5(folder):
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(every.LINES), model_writer=file, vocab_size=60, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    names = [f'<extra_id_{index}>' for index in range(10)]
    write(folder, {'tokenizer_class': 'T5Tokenizer', 'extra_ids': 10, 'additional_special_tokens': names, **SPECIAL})
    (folder / 'spiece.model').write_bytes(file.getvalue())
    return folder


def resave(folder):
    """Returns a folder in which the installed transformers has saved the tokenizer of `folder`."""
    target = folder.with_name(f'{folder.name}_again')
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.save_pretrained(target)
    return target


def mt5(folder):
    write(folder, {'tokenizer_class': 'T5Tokenizer', 'extra_ids': 0, 'additional_special_tokens': None, **SPECIAL})
    shutil.move(every.write_mt5(folder), folder / 'spiece.model')
    return folder


def byt5(folder, extra_ids):
    folder.mkdir()
    tokenizer_export.write_tokenizer(vocabularies.byte(extra_ids), folder)
    return folder


def gpt2_folder(folder):
    write(folder, {'tokenizer_class': 'GPT2Tokenizer', **dict.fromkeys(('bos_token', 'eos_token'), '<|endoftext|>')})
    every.write_gpt2(folder)
    return folder


def bert(folder, **config):
    write(folder, {**BERT, **config})
    (folder / 'vocab.txt').write_text('\n'.join([*every.WORDS, 'The', 'e', 'é', '你', 'w', '##é', '##e']))
    return folder


def add_token(folder):
    """Adds a token with capital letters, which also matches other letters if the tokenizer lowercases the text."""
    pieces = (folder / 'vocab.txt').read_text().split('\n')
    (folder / 'added_tokens.json').write_text(json.dumps({'WORD': len(pieces)}))
    return folder


def set_flags(folder, tokens, **flags):
    """Adds `tokens`, a dict from ids, with flags that affect the surrounding text to tokenizer_config.json."""
    config = json.loads((folder / 'tokenizer_config.json').read_text())
    added = {str(index): {'content': token, **flags} for index, token in tokens.items()}
    return write(folder, {**config, 'added_tokens_decoder': added})


FOLDERS = {
    't5': t5,
    't5_saved_again': lambda folder: resave(t5(folder)),
    # transformers 4 writes these flags.
    't5_of_transformers_4': lambda folder: set_flags(
        t5(folder), {69 - index: f'<extra_id_{index}>' for index in range(10)}, lstrip=True, rstrip=True, special=True
    ),
    'mt5': mt5,
    'byt5': lambda folder: byt5(folder, 20),
    'byt5_as_pretrained': lambda folder: byt5(folder, 0),
    'byt5_saved_again': lambda folder: resave(byt5(folder, 20)),
    'gpt2': gpt2_folder,
    'gpt2_saved_again': lambda folder: resave(gpt2_folder(folder)),
    'bert': bert,
    'bert_cased': lambda folder: bert(folder, do_lower_case=False),
    'bert_with_accents': lambda folder: bert(folder, strip_accents=False),
    'bert_of_chinese_words': lambda folder: bert(folder, tokenize_chinese_chars=False),
    'bert_with_an_added_token': lambda folder: add_token(bert(folder)),
    'bert_with_an_added_whole_word': lambda folder: set_flags(
        bert(folder), {len(every.WORDS) + 7: 'wor'}, single_word=True, normalized=False
    ),
    'bert_with_an_added_token_saved_again': lambda folder: resave(add_token(bert(folder))),
    'bert_saved_again': lambda folder: resave(bert(folder, do_lower_case=False)),
}


# Families by the part of a name in `FOLDERS` before the first underscore; other names, such as byt5, use T5.
SIZES = dict.fromkeys(('vocab_size', 'embed_dim', 'mlp_dim', 'num_heads', 'head_dim'), 1)
FAMILIES = {
    'gpt2': Gpt2(**SIZES, num_decoder_layers=1, max_length=1, end_id=259),
    'bert': Bert(**SIZES, num_encoder_layers=1, max_length=1, token_types=1),
    't5': T5(**SIZES, num_encoder_layers=1, num_decoder_layers=1, activation='gelu'),
}


def find_family(name):
    return FAMILIES.get(name.partition('_')[0], FAMILIES['t5'])


def vocabulary_of(name, folder):
    function, arguments = find_family(name).find_tokenizer(folder, None)
    return getattr(vocabularies, function)(**arguments)


@pytest.mark.parametrize('name', FOLDERS)
def test_ids_equal_those_of_transformers(tmp_path, monkeypatch, name):
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    folder = FOLDERS[name](tmp_path / name)
    ours, written, family = vocabulary_of(name, folder), tmp_path / 'written', find_family(name)
    written.mkdir()
    shifted = bool(family.id_offset)
    tokenizer_export.write_tokenizer(ours, written, shifted, family.tokenizer_outputs)
    # For some model types, transformers ignores tokenizer.json without tokenizer_config.json.
    (written / 'config.json').write_text(json.dumps({'model_type': name.partition('_')[0]}))
    theirs = [transformers.AutoTokenizer.from_pretrained(path, local_files_only=True) for path in (folder, written)]
    assert theirs[1].pad_token_id == (None if shifted else 0)
    if not isinstance(family, T5):
        # For BERT, this includes token types.
        assert dict(theirs[0]('the', 'word')) == dict(theirs[1]('the', 'word'))
    ids_of = getattr(ours, 'huggingface_ids', ours.encode)

    @settings(max_examples=300)
    @given(TEXTS.map(''.join))
    def check_ids(text):
        if name == 'byt5_as_pretrained':
            text = text.replace('<extra_id_', '')
        if name.startswith(('t5', 'mt5')):
            # SentencePiece treats this character as a letter, and transformers as whitespace.
            text = text.replace('\x85', '')
        if name == 'mt5':
            # transformers removes this character, SentencePiece's space, before a sentinel.
            text = text.replace('▁<', '<')
        for tokenizer in theirs:
            assert list(ids_of(text)) == tokenizer(text, add_special_tokens=False).input_ids

    check_ids()
    assert 'same ids' in model_folders.compare_token_ids(folder, ours)
    if name == 'byt5_as_pretrained':
        # Published models have 384 ids.
        assert theirs[1].decode([75, 383]) == 'H<extra_id_124>'


def test_the_reason_why_transformers_cannot_load_a_tokenizer_is_shown(tmp_path):
    folder = t5(tmp_path / 't5')
    (folder / 'config.json').write_text('{"model_type": "umt5"}')
    assert 'serialization file' in model_folders.compare_token_ids(folder, vocabularies.byte())


def test_ids_are_not_compared_without_a_tokenizer(tmp_path):
    """transformers 5 would create an empty T5 tokenizer."""
    (tmp_path / 'config.json').write_text('{"model_type": "t5"}')
    assert 'has no tokenizer' in model_folders.compare_token_ids(tmp_path, vocabularies.byte())


@pytest.mark.parametrize(
    ('added', 'words'),
    [
        ({'<ORG>': 70}, '<ORG>'),
        ({'s': 10}, "added token 's'"),
        ({f'<extra_id_{index}>': 60 + index for index in range(10)}, '<extra_id_0>.*69'),
    ],
)
def test_added_tokens_and_reordered_sentinels_raise_a_one_line_error(tmp_path, added, words):
    folder = t5(tmp_path / 't5')
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / 'spiece.model'))
    assert pieces.IdToPiece(pieces.PieceToId('s')) == 's'
    (folder / 'added_tokens.json').write_text(json.dumps(added))
    with pytest.raises(UserError, match=words) as error:
        t5_tokenizer.find_t5_tokenizer(folder)
    assert '\n' not in str(error.value)


def test_contradicting_settings_raise_an_error(tmp_path):
    folder = resave(bert(tmp_path / 'bert', do_lower_case=True))
    config = json.loads((folder / 'tokenizer_config.json').read_text())
    write(folder, {**config, 'do_lower_case': False})
    if not (folder / 'tokenizer.json').is_file():
        pytest.skip('this version of transformers writes no tokenizer.json')
    with pytest.raises(UserError, match='do_lower_case'):
        vocabularies.wordpiece(str(folder / 'tokenizer.json')).vocab_size  # noqa: B018


@pytest.mark.parametrize(
    ('keys', 'value', 'words'),
    [(('pre_tokenizer',), {'type': 'Whitespace'}, 'pre_tokenizer'),
     (('model', 'type'), 'BPE', 'type')],
)  # fmt: skip
def test_a_tokenizer_json_with_unsupported_steps_raises_a_one_line_error(tmp_path, monkeypatch, keys, value, words):
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    file = resave(t5(tmp_path / 't5')) / 'tokenizer.json'
    content = json.loads(file.read_text())
    parent = content
    for name in keys[:-1]:
        parent = parent[name]
    parent[keys[-1]] = value
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=words) as error:
        vocabularies.sentencepiece(str(file), 10).vocab_size  # noqa: B018
    assert '\n' not in str(error.value)
