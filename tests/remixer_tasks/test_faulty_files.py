"""Faulty text files: each fault is counted and reported, or rejected if STRICT is set, in bounded memory."""

import os
import tracemalloc

import pytest

from remixer_tasks import local_files
from remixer_tasks.benchmarks import raw_rows
from remixer_tasks.files import text_lines
from remixer_tasks.files.text_lines import BadRecords
from tests.support.error_lines import error_message


def read(path, strict=False, **layout):
    skipped = BadRecords(strict)
    return list(
        local_files.read_documents(str(path), local_files.TextLayout(**layout), skipped)
    ), skipped.describe_skipped_records()


# Content, format, expected documents, and the expected message about the skipped text.
FAULTS = {
    'NUL bytes': (b'good\nb\0d\nfine', 'txt', ['good', 'fine'], ':2: a NUL character'),
    'invalid UTF-8': (b'good\n\xff\xfe\nfine\n', 'txt', ['good', 'fine'], ':2: invalid UTF-8'),
    'a line too long': (b'good\n' + b'x' * 99 + b'\nfine\n', 'txt', ['good', 'fine'], ':2: the line has more than 50'),
    'a line with 50 characters and CRLF': (b'x' * 50 + b'\r\nfine', 'txt', ['x' * 50, 'fine'], None),
    'a line with 51 characters': (b'x' * 51 + b'\r\nfine', 'txt', ['fine'], ':1: the line has more than 50'),
    'empty JSON texts': (b'{"text": ""}\n{"text": "good"}\n{"text": " "}\n', 'jsonl', ['good'], ', 2 empty skipped'),
    'empty cells': (b'text\tx\n\t1\ngood\t2\n', 'tsv', ['good'], ', 1 empty skipped'),
    'a huge number': (b'{"text": "good"}\n{"text": ' + b'9' * 40 + b'}\n', 'jsonl', ['good'], ":2: the field 'text'"),
}


@pytest.mark.parametrize('kind', FAULTS)
def test_a_faulty_line_is_counted_or_rejected(tmp_path, monkeypatch, kind):
    content, text_format, expected, message = FAULTS[kind]
    monkeypatch.setattr(text_lines, 'MAX_CHARACTERS', 50)
    path = tmp_path / 'a'
    path.write_bytes(content)
    layout = {'format': text_format, 'txt_documents': 'line'}
    texts, summary = read(path, **layout)
    assert texts == expected
    if message is None:
        assert summary == '' and read(path, strict=True, **layout) == (expected, '')
        return
    assert message in summary and len(summary.splitlines()) == 1
    assert 'STRICT = False' in error_message(lambda: read(path, strict=True, **layout))


def test_a_huge_line_is_read_in_bounded_memory(tmp_path, monkeypatch):
    """The sparse file has a line of 200 MiB between two valid lines, and ends with 50 MiB without a newline."""
    monkeypatch.setattr(text_lines, 'MAX_CHARACTERS', 1_000_000)
    path = tmp_path / 'huge.txt'
    with open(path, 'wb') as file:
        file.write(b'good\n')
        file.truncate(200 * 2**20)
        file.seek(200 * 2**20)
        file.write(b'\nfine\n')
        file.truncate(250 * 2**20)
    tracemalloc.start()
    try:
        texts, summary = read(path, txt_documents='line')
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert texts == ['good', 'fine'] and ', 2 malformed skipped' in summary
    assert peak < 8 * 2**20


def test_a_huge_document_is_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text_lines, 'MAX_CHARACTERS', 10_000)
    path = tmp_path / 'a.txt'
    path.write_bytes(b''.join(b'%d\n' % number for number in range(50_000)) + b'\nshort\n')
    tracemalloc.start()
    texts, summary = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A list of its lines would take 3 MiB.
    assert texts == ['short'] and peak < 2**20
    assert ':1: the document that begins here has more than 10,000 characters' in summary


def test_pipes_folders_and_deleted_files_are_rejected(tmp_path):
    path = tmp_path / 'a.txt'
    path.write_text('one\n\ntwo\n')
    corpus = local_files.corpus(str(tmp_path / '*.txt'))
    path.unlink()
    assert f'{path}: No such file or directory' in error_message(lambda: list(corpus.read_training_documents()))
    os.mkfifo(tmp_path / 'pipe.txt')
    assert 'it is a pipe, socket or device, not a file' in error_message(read, tmp_path / 'pipe.txt')
    assert 'got the folder' in error_message(local_files.corpus, str(tmp_path))


def test_malformed_rows_of_published_files_are_never_skipped(tmp_path, monkeypatch):
    path = tmp_path / 'a'
    path.write_bytes(b'{"a": 1}\n{"a": "\0"}\n')
    assert ':2: a NUL character' in error_message(lambda: list(raw_rows.read_jsonl(str(path))))
    monkeypatch.setattr(text_lines, 'MAX_CHARACTERS', 8)
    assert ':2: the line has more than' in error_message(lambda: list(raw_rows.read_lines(str(path))))
