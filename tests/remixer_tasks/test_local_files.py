"""Local text files: all formats give the same documents, and errors have one line."""

import gzip
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from remixer_tasks import local_files, pretraining, text_pairs, vocabularies
from tests.support.error_lines import error_message

DOCUMENTS = [f'Document {number} says:\n"tabs or spaces", naïvely — 你好 {"x" * number}.' for number in range(40)]
ONE_LINE = [document.replace('\n', ' ') for document in DOCUMENTS]


def write(folder, name, docs=DOCUMENTS):
    path = folder / name
    kind = name.lower().removesuffix('.gz').rpartition('.')[2]
    if kind == 'parquet':
        pq.write_table(pa.table({'id': range(len(docs)), 'text': docs}), path)
        content = path.read_bytes()
    elif kind == 'jsonl':
        content = '\n'.join(json.dumps({'id': 1, 'text': doc}) for doc in docs).encode()
    elif kind == 'tsv':
        content = ('id\ttext\n' + ''.join(f'1\t{doc}\n' for doc in docs)).encode()
    else:
        content = '\n \n\n'.join(docs).encode()
    path.write_bytes(gzip.compress(content) if name.lower().endswith('.gz') else content)
    return str(path)


def texts(corpus, split):
    dataset = corpus.create_source().get_dataset(split, shuffle=False)
    return [example['text'].decode() for example in dataset.as_numpy_iterator()]


def all_texts(corpus):
    return sorted(texts(corpus, 'train') + texts(corpus, 'validation'))


@pytest.mark.parametrize('name', ['a.txt', 'a.jsonl.gz', 'a.parquet', 'A.PARQUET.GZ'])
def test_every_format_gives_the_documents(tmp_path, name):
    assert all_texts(local_files.corpus(write(tmp_path, name))) == sorted(DOCUMENTS)


@pytest.mark.parametrize(('name', 'field', 'extra'), [('a.tsv', 'text', 0), ('A.TSV.GZ', 1, 1)])
def test_tsv_columns_are_selected_by_name_or_number(tmp_path, name, field, extra):
    actual = all_texts(local_files.corpus(write(tmp_path, name, ONE_LINE), field=field))
    assert actual == sorted(ONE_LINE + ['text'] * extra), 'a column number means that there is no header line'


def test_the_first_row_of_json_lines_may_lack_the_text(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"id": 1}\n{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / 'empty.jsonl').touch()
    assert all_texts(local_files.corpus(str(tmp_path / '*.jsonl'))) == ['one', 'two']


@pytest.mark.parametrize(('setting', 'count'), [('passage', 2), ('paragraph', 2), ('line', 3), ('file', 1)])
def test_text_files_are_split_into_documents(tmp_path, setting, count):
    (tmp_path / 'a.txt').write_bytes(b'\xef\xbb\xbfone\r\ntwo\r\n\r\n\r\nthree\r\n')
    (tmp_path / 'b.txt').write_text('other')
    actual = all_texts(local_files.corpus(str(tmp_path / '*.txt'), txt_documents=setting))
    assert len(actual) == count + 1
    assert ' '.join(sorted(' '.join(actual).split())) == 'one other three two'


def test_a_passage_consists_of_adjacent_paragraphs(tmp_path):
    paragraphs = [f'{name} {number}: ' + 'word ' * (number % 7) for name in 'ab' for number in range(2000)]
    for name in 'ab':
        (tmp_path / f'{name}.txt').write_text('\n\n'.join(text for text in paragraphs if text.startswith(name)))
    write(tmp_path, 'c.jsonl', ['a row', 'another'])
    actual = all_texts(local_files.corpus(str(tmp_path / '[abc].*'), txt_documents='passage', validation_fraction=0.2))
    passages = [text for text in actual if ':' in text]
    assert sorted(set(actual) - set(passages)) == ['a row', 'another']
    smallest = sum(path.stat().st_size for path in tmp_path.glob('?.*')) // local_files.PASSAGES_PER_CORPUS
    sizes = [sum(map(len, passage.split('\n\n'))) for passage in passages]
    # The last passage of a file may be shorter.
    assert sum(size < smallest for size in sizes) <= 2 and max(sizes) < smallest + 50 and len(sizes) > 80
    order = {text.strip(): index for index, text in enumerate(paragraphs)}
    positions = [[order[text.strip()] for text in passage.split('\n\n')] for passage in passages]
    for indices in positions:
        # The paragraphs are adjacent, and from the same file.
        assert indices == [*range(indices[0], indices[-1] + 1)] and indices[0] // 2000 == indices[-1] // 2000
    assert sorted(sum(positions, [])) == [*range(4000)]


def test_passages_of_small_validation_files_are_as_long_as_those_of_training_files(tmp_path):
    for name, count in (('train', 4000), ('held_out', 100)):
        (tmp_path / f'{name}.txt').write_text('\n\n'.join(f'{name} {number}' for number in range(count)))
    files = [str(tmp_path / f'{name}.txt') for name in ('train', 'held_out')]
    corpus = local_files.corpus(*files, txt_documents='passage')
    sizes = {split: [len(text) for text in texts(corpus, split)] for split in ('train', 'validation')}
    # The last passage of a file may be shorter.
    assert min(sizes['validation'][:-1]) > 0.9 * max(sizes['train']) and len(sizes['validation']) > 1


def test_files_may_be_globs_lists_and_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    for name in ('a.txt', 'b.txt', 'c.jsonl'):
        write(tmp_path, name, [f'{name} {number}' for number in range(3)])
    actual = all_texts(local_files.corpus(['~/*.txt', str(tmp_path / 'c.jsonl'), '~/a.txt']))
    assert actual == sorted(f'{name} {number}' for name in ('a.txt', 'b.txt', 'c.jsonl') for number in range(3))


def test_a_file_name_may_look_like_a_pattern(tmp_path):
    name = 'a b%d[1]*?{x}$HOME\n模型.txt'
    write(tmp_path, name, ['one', 'two'])
    assert all_texts(local_files.corpus(str(tmp_path / name))) == ['one', 'two']


def test_held_out_documents_stay_held_out_if_text_is_added(tmp_path):
    """Each split has at least one document; VALIDATION_FILES replace the documents that are held out."""
    for fraction, count in ((1e-9, 1), (1 - 1e-9, 2)):
        corpus = local_files.corpus(write(tmp_path, 'a.txt', ['one', 'two', 'three']), validation_fraction=fraction)
        assert len(texts(corpus, 'validation')) == count and all_texts(corpus) == ['one', 'three', 'two']
    corpus = local_files.corpus(write(tmp_path, 'a.txt'), write(tmp_path, 'b.txt', ['held out']))
    assert texts(corpus, 'validation') == ['held out'] and sorted(texts(corpus, 'train')) == sorted(DOCUMENTS)
    docs = [f'document {number}' for number in range(2000)]
    smaller = local_files.corpus(write(tmp_path, 'few.txt', docs[:1000]), validation_fraction=0.05)
    larger = local_files.corpus(write(tmp_path, 'all.txt', docs), validation_fraction=0.05)
    held_out = set(texts(smaller, 'validation'))
    assert 25 <= len(held_out) <= 80
    assert held_out == set(texts(larger, 'validation')) & set(docs[:1000])
    assert not held_out & set(texts(smaller, 'train'))


def test_a_changed_file_is_read_again(tmp_path):
    path = write(tmp_path, 'a.txt')
    assert all_texts(local_files.corpus(path)) == sorted(DOCUMENTS)
    write(tmp_path, 'a.txt', ['new', 'text'])
    assert all_texts(local_files.corpus(path)) == ['new', 'text']


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'files': 'nothing/*.txt'}, 'FILES must .*match a file, got nothing/'),
        ({'files': '*.txt', 'validation_files': 'a.txt'}, 'VALIDATION_FILES and FILES must not share files'),
        *(
            (
                {'files': 'a.txt', 'validation_files': files},
                f'VALIDATION_FILES must be a path .* got {files!r}'.rstrip(']'),
            )
            for files in ('', 5)
        ),
        ({'files': [5]}, r"FILES must be a path or glob, or a list of them, got \[5\]; pass --gin.FILES='~/data"),
        ({'files': 'a.dat'}, 'unknown extension; rename it, or set TEXT_FORMAT'),
        *(({'files': 'a.txt.zst', 'format': format}, 'a.txt.zst .*decompress it') for format in (None, 'txt')),
        ({'files': 'a.jsonl', 'field': 'body'}, "TEXT_FIELD must use columns of .*'id', 'text'.* got 'body'"),
        ({'files': 'a.parquet', 'field': 'body'}, "TEXT_FIELD must use columns of .*'id', 'text'.* got 'body'"),
        ({'files': 'a.txt', 'format': 'parquet'}, 'not a Parquet file'),
        ({'files': 'damaged.txt.gz'}, 'damaged gzip file'),
        ({'files': 'empty.txt'}, 'has no documents'),
    ],
)
def test_wrong_settings_and_files_are_rejected(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    for name in ('a.txt', 'a.jsonl', 'a.parquet'):
        write(tmp_path, name)
    write(tmp_path, 'empty.txt', [' ', ''])
    (tmp_path / 'a.dat').write_text('x')
    (tmp_path / 'a.txt.zst').write_text('compressed bytes\n\nthat are valid lines')
    (tmp_path / 'damaged.txt.gz').write_bytes(gzip.compress(b'text ' * 1000)[:20])
    assert re.search(message, error_message(lambda: all_texts(local_files.corpus(**settings))))


def test_a_name_that_tasks_cannot_have_is_rejected(tmp_path):
    corpus = local_files.corpus(write(tmp_path, 'a.txt'))
    for build in (pretraining.causal_lm, text_pairs.task):
        assert "letters, digits and _.:#, got 'my-data" in error_message(build, corpus, vocabularies.byte(), 'my-data')
