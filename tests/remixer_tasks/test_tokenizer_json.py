"""Hostile tokenizer.json files raise an error of one line, or result in a tokenizer that terminates.

Each file is read in a separate process, because the tokenizers library aborts the process or hangs with such files.
"""

import copy
import json
import time

import pytest
import tokenizers

from remixer_t5x.errors import UserError
from tests.support.real_processes import Process

PIECES = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'a', 'é', 'e', 'text', '##s', 'of', 'words', '##a', '.']
TEXTS = ['a texts of words.', 'É A text [MASK] of', 'the 東 unknown', '', ' \0\t a ', 'a' * 99, 'a' * 101, 'xyz[NEW]s']
ADDED = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
REPLACE = {'type': 'Replace', 'pattern': {'String': 'a'}, 'content': 'a' * 10}
# Key path in the file, and its value.
HOSTILE = [
    ('normalizer', {'type': 'Sequence', 'normalizers': [REPLACE] * 12}),
    ('pre_tokenizer', {'type': 'Split', 'pattern': {'Regex': '(a|aa)+$'}, 'behavior': 'Isolated', 'invert': False}),
    ('post_processor', {'type': 'TemplateProcessing', 'single': [{'SpecialToken': {'id': 'x', 'type_id': 0}}]}),
    ('padding', {'strategy': {'Fixed': 8589934592}, 'direction': 'Right', 'pad_id': 0, 'pad_token': '[PAD]'}),
    ('truncation', {'max_length': 0, 'strategy': 'LongestFirst', 'stride': 9}),
    ('decoder', {'type': 'Strip', 'content': 'a', 'start': 10**18, 'stop': 10**18}),
    ('model.max_input_chars_per_word', 10**9),
    ('model.unk_token', 'missing'),
    ('model.vocab', {**{piece: index for index, piece in enumerate(PIECES)}, 'far': 2**32 - 1}),
    ('model.vocab', {**{piece: index for index, piece in enumerate(PIECES)}, 'twice': 3}),
    ('added_tokens', [{'id': 2**63, 'content': '[NEW]', **ADDED}]),
]


def content(**flags):
    """Returns the content of BERT's tokenizer.json with one additional token."""
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = tokenizers.BertWordPieceTokenizer(vocab, **flags)
    tokenizer.add_special_tokens(['[NEW]'])
    return json.loads(tokenizer.to_str())


@pytest.mark.parametrize('flags', [{}, {'lowercase': False, 'clean_text': False}])
def test_ids_and_texts_equal_those_of_the_library(tmp_path, flags):
    from remixer_tasks.vocabulary import huggingface_tokenizer

    path = tmp_path / 'tokenizer.json'
    path.write_text(json.dumps(content(**flags)))
    ours, theirs = huggingface_tokenizer.load_wordpiece_tokenizer(str(path)), tokenizers.Tokenizer.from_file(str(path))
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.get_vocab(True) == theirs.get_vocab(True)


def read_and_encode(path):
    """Reads a tokenizer and encodes a long word, or checks the error; limits the time."""
    from remixer_tasks.vocabulary import huggingface_tokenizer

    start = time.monotonic()
    try:
        tokenizer = huggingface_tokenizer.load_wordpiece_tokenizer(path)
        for text in ('a' * 200_000, 'a text of words'):
            tokenizer.encode(text, add_special_tokens=False)
    except UserError as error:
        assert len(str(error).splitlines()) == 1 and len(str(error)) < 500
    assert time.monotonic() - start < 20


def test_hostile_files_are_rejected_or_harmless(tmp_path):
    processes = []
    for number, (key_path, value) in enumerate(HOSTILE):
        changed = copy.deepcopy(content())
        *parents, name = key_path.split('.')
        inner = changed[parents[0]] if parents else changed
        inner[name] = value
        path = tmp_path / f'{number}.json'
        path.write_text(json.dumps(changed))
        processes.append((key_path, value, Process(read_and_encode, str(path), output=tmp_path / f'{number}.txt')))
    failures = [(key_path, value, process.output()) for key_path, value, process in processes if process.wait(60)]
    assert not failures, failures
