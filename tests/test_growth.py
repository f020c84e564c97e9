"""Readers, tokenizers and metrics take about linear time in the length of the worst text: at most n^1.3.

Processor seconds of one thread at 10 kB, 100 kB and 1 MB, the least of several runs. Only their ratio is compared, and
what is quick at 1 MB counts as linear.
"""

import contextlib
import json
import math
import pathlib
import random
import time

import pytest
import seqio

from remixer_t5x import untrusted_files
from remixer_t5x.checkpoints import config_changes
from remixer_t5x.errors import UserError
from remixer_tasks import vocabularies
from remixer_tasks.benchmarks import pair_metrics
from remixer_tasks.corpora import documents, parsing
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.files import malformed, parts, row_files, text_files
from remixer_tasks.vocabulary import byte_pairs, word_vocabulary, wordpiece

SIZES = (10_000, 100_000, 1_000_000)
STEEPEST = 1.3
# Seconds below which a clock tells nothing.
UNMEASURABLE = 0.02


def growth(prepare):
    """The largest exponent between two sizes. `prepare(size)` returns what is measured."""
    before, steepest = None, 0.0
    for size in SIZES:
        call = prepare(size)
        seconds = min(_seconds(call) for _ in range(3))
        if before is not None and seconds > UNMEASURABLE:
            steepest = max(steepest, math.log10(seconds / max(before, UNMEASURABLE / 10)))
        if steepest > STEEPEST:
            # The next size could take hours.
            return steepest
        before = seconds
    return steepest


def _seconds(call):
    begun = time.thread_time()
    call()
    return time.thread_time() - begun


def drained(iterator):
    """Reads to the end, or to a refusal."""
    try:
        for _ in iterator:
            pass
    except UserError:
        pass


def test_growth_tells_a_square_from_a_line():
    def square(size):
        return lambda: sum(1 for _ in range((size // 300) ** 2))

    assert growth(square) > 1.6 and growth(lambda size: lambda: sum(range(size))) < STEEPEST


def letters(size):
    """Without a space."""
    return ''.join(random.Random(0).choices('abcdefgh', k=size))


TEXTS = {
    'letters': letters,
    'one letter': lambda size: 'a' * size,
    'spaces': lambda size: ' ' * (size - 1) + 'a',
    'combining marks': lambda size: 'a' + '\u0301' * (size // 2),
    'Chinese': lambda size: ''.join(chr(0x4E00 + 7 * i % 9000) for i in range(size // 3)),
    'apostrophes': lambda size: "'" * size,
}
CONTENTS = {
    **TEXTS,
    'empty lines': lambda size: '\n' * size,
    'lines of spaces': lambda size: ' \n' * (size // 2),
    'lines without a paragraph': lambda size: 'a\n' * (size // 2),
    'quotes': lambda size: '"' * size,
    'an open quote': lambda size: 'a,b\n"' + 'x\n' * (size // 2),
    'columns': lambda size: ','.join(f'c{i}' for i in range(size // 7)) + '\n1\n',
    'tabs': lambda size: '\t' * size + '\n',
    'array': lambda size: '[' + '{"text": "a"}, ' * (size // 15) + '{}]',
    'open brackets': lambda size: '{"text": ' * (size // 9),
    'digits': lambda size: '{"text": 1.' + '1' * size + '}\n',
    'escapes': lambda size: '{"text": "' + '\\ud800' * (size // 6) + '"}\n',
    'names twice': lambda size: '{' + ', '.join(f'"c{i}": 0' for i in range(size // 12)) + ', "c0": 0, "c0": 1}\n',
    'last name twice': lambda size: '{' + ', '.join(f'"c{i}": 0' for i in range(size // 12)) + ', "x": 0, "x": 1}',
    'bad lines': lambda size: '\0\n' * (size // 2),
}


def txt(kind):
    return lambda path: drained(documents.read(path, documents.Layout('txt', txt_documents=kind), malformed.Notes()))


def in_parts(form, kind):
    layout = documents.Layout(form, txt_documents=kind)

    def read(path):
        for part in parsing._parts(path, layout):
            drained(documents.read(path, layout, malformed.Notes(), part))
            parsing._count_lines(path, part)

    return read


def rows(form):
    return lambda path: drained(row_files.read(path, row_files.RowLayout(form), malformed.Notes()))


def parsed(parse):
    def read(path):
        with open(path, 'rb') as file:
            with contextlib.suppress(untrusted_files.NotJson):
                parse(file.read())

    return read


READERS = {
    **{f'txt by {kind}': txt(kind) for kind in documents.TXT_DOCUMENTS if kind != 'passage'},
    **{f'txt by {kind}, in parts': in_parts('txt', kind) for kind in ('paragraph', 'line')},
    'JSON lines in parts': in_parts('jsonl', 'line'),
    **{form: rows(form) for form in ('jsonl', 'tsv', 'csv')},
    'tsv of text': lambda path: drained(documents.read(path, documents.Layout('tsv'), malformed.Notes())),
    'other encodings': lambda path: drained(text_files.lines(path, 10**8, malformed.Notes(), 'latin-1')),
    'own JSON lines': lambda path: list(untrusted_files.json_lines(path)),
    'JSON': parsed(untrusted_files.parse),
    'unique JSON': parsed(untrusted_files.parse_unique),
    'gin of a checkpoint': lambda path: config_changes.bindings(pathlib.Path(path).read_text()),
}


@pytest.mark.parametrize('reader', READERS.values(), ids=READERS)
def test_readers(reader, tmp_path, monkeypatch):
    # As many parts in a megabyte as a file of four gigabytes has.
    monkeypatch.setattr(parts, 'BYTES', 1000)
    monkeypatch.setattr(parts, '_CHUNK', 1000)
    steep = {}
    for name, content in CONTENTS.items():

        def prepare(size, content=content):
            path = tmp_path / f'{size}.txt'
            path.write_text(content(size))
            return lambda: reader(str(path))

        if (exponent := growth(prepare)) > STEEPEST:
            steep[name] = exponent
    assert not steep


def gin(size):
    return 'A = \\\n' + '    1\\\n' * (size // 7)


def test_the_gin_of_a_checkpoint_with_one_long_value():
    assert growth(lambda size: lambda: config_changes.bindings(gin(size))) < STEEPEST


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
    folder, pairs = tmp_path_factory.mktemp('tokenizers'), ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h']
    pieces, merges = [*byte_pairs.byte_letters()], []
    for first in [*pairs, *(a + b for a in pairs for b in pairs)]:
        for second in pairs:
            merges.append(f'{first} {second}')
            pieces.append(first + second)
    folder.joinpath('vocab.json').write_text(json.dumps({piece: i for i, piece in enumerate(dict.fromkeys(pieces))}))
    folder.joinpath('merges.txt').write_text('\n'.join(merges))
    bert = [wordpiece.PAD, wordpiece.UNKNOWN, wordpiece.CLS, wordpiece.SEP, wordpiece.MASK, *pairs, '##a', '##b']
    folder.joinpath('vocab.txt').write_text('\n'.join(bert))
    lines = [f'the word {i * 7919 % 10007} {"abcdefgh"[i % 8] * (i % 5)}' for i in range(2000)]
    return {
        'bytes': seqio.ByteVocabulary(100),
        'words': word_vocabulary.WordVocabulary('words', lambda: ['a b c']),
        'GPT-2': byte_pairs.BytePairs(str(folder), 0),
        'BERT': wordpiece.WordPieceVocabulary(str(folder / 'vocab.txt')),
        'SentencePiece': vocabularies.trained(ParsedCorpus('w', 'w', lambda malformed: iter(lines)), 400),
    }


@pytest.mark.parametrize('name', ['bytes', 'words', 'GPT-2', 'BERT', 'SentencePiece'])
def test_tokenizers(tokenizers, name):
    vocabulary, steep = tokenizers[name], {}
    vocabulary.encode('a')
    for kind, text in TEXTS.items():

        def encode(size, text=text):
            content = text(size)
            return lambda: vocabulary.encode(content)

        def decode(size, text=text):
            ids = vocabulary.encode(text(size))
            return lambda: vocabulary.decode(ids)

        for what, prepare in (('encode', encode), ('decode', decode)):
            if (exponent := growth(prepare)) > STEEPEST:
                steep[what, kind] = exponent
    assert not steep


METRIC_TEXTS = {
    **TEXTS,
    'words': lambda size: ' '.join(f'w{i % 977}' for i in range(size // 5)),
    'articles': lambda size: 'the ' * (size // 4),
    'sentences': lambda size: 'a . ' * (size // 4),
    'digits': lambda size: '1' * size,
}


@pytest.mark.parametrize('name', pair_metrics.NAMED)
def test_metrics(name):
    """Of one long pair, or its refusal in one line."""
    (metric,) = pair_metrics.named([name])
    steep = {}
    for kind, text in METRIC_TEXTS.items():

        def prepare(size, text=text):
            content = text(size)

            def call():
                try:
                    metric([content, 'a'], [f'{content} b', 'b'])
                except UserError as error:
                    assert '\n' not in str(error)

            return call

        if (exponent := growth(prepare)) > STEEPEST:
            steep[kind] = exponent
    assert not steep
