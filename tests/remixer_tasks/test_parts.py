"""Files that several processes read in parts: the same documents, in the same order, and the same complaints."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_tasks import local_files
from remixer_tasks.corpora import documents, parsing
from remixer_tasks.files import bounded_lines, parts, text_files, workers
from remixer_tasks.files.malformed import Malformed, Notes
from tests.support import paths

ODD = [
    b'',
    b' ',
    b'\xe3\x80\x80',
    b'a\0b',
    b'\xff',
    b'\r',
    b'crlf\r',
    b'\xef\xbb\xbfx',
    b'{"text": "t"}',
    b'{"text": ""}',
]
LINES = st.lists(st.sampled_from([*ODD, b'word', b'x' * 40, b'z' * 90]), max_size=40)


def plain(content, longest):
    """(number, text) of the good lines and the numbers of the bad, one line at a time."""
    good, bad = [], []
    for number, line in enumerate(content.removesuffix(b'\n').split(b'\n') if content else [], 1):
        try:
            if b'\0' in line or len(line) > longest:
                raise ValueError
            good.append((number, line.decode('utf-8-sig' if number == 1 else 'utf-8').rstrip('\r')))
        except ValueError:
            bad.append(number)
    return good, bad


@settings(max_examples=60, deadline=None)
@given(LINES, st.booleans(), st.sampled_from([20, 64, 1000]))
def test_lines_read_in_chunks_are_those_read_one_by_one(tmp_path_factory, lines, ends, longest):
    content = b'\n'.join(lines) + b'\n' * ends
    path = tmp_path_factory.mktemp('lines') / 'a.txt'
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_lines, '_CHUNK', 64)
        notes = Notes()
        found = list(text_files.lines(str(path), longest, notes))
    good, bad = plain(content, longest)
    assert (found, [line for line, _ in notes.first]) == (good, bad[:3])
    assert notes.count == len(bad)


@settings(max_examples=60, deadline=None)
@given(LINES, st.booleans(), st.sampled_from(['txt line', 'txt paragraph', 'jsonl']), st.integers(8, 90))
def test_parts_together_are_the_file(tmp_path_factory, lines, ends, kind, size):
    path = tmp_path_factory.mktemp('parts') / 'a'
    content = b'{"text": "first"}\n' + b'\n'.join(lines) + b'\n' * ends
    path.write_bytes(content)
    form, _, cut_by = kind.partition(' ')
    layout = documents.Layout(form, txt_documents=cut_by or 'paragraph', longest=70)
    whole, together = Malformed(False), Malformed(False)
    expected = list(documents.read(str(path), layout, whole))
    found, before = [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, 'BYTES', size)
        for part in parts.cut(len(content), cut_by == 'paragraph'):
            notes = Notes()
            found += documents.read(str(path), layout, notes, part)
            together.add(str(path), before, notes)
            with open(path, 'rb') as file:
                before += parts.count_lines(file, part)
    if not found and form == 'txt':
        # No part knows that the others have no text either.
        together.empty(str(path), 1)
    assert found == expected
    assert together.summary() == whole.summary()
    assert before == content.count(b'\n')


@pytest.fixture
def two_processes(monkeypatch):
    """Files of a few lines are read as large files are."""
    monkeypatch.setattr(parsing, '_WORTH_IT', 1)
    monkeypatch.setattr(parts, 'BYTES', 4000)
    monkeypatch.setattr(workers, 'cores', lambda: 2)


def write(folder):
    docs = [f'document {number}\nof two lines' for number in range(900)]
    (folder / 'a.txt').write_text('\n\n'.join(docs))
    rows = [json.dumps({'text': f'row {number}'}) for number in range(300)]
    rows[200:200] = ['{"text": "cut', '{"text": " "}']
    (folder / 'b.jsonl').write_text('\n'.join(rows))
    (folder / 'c.txt').write_text('\n \n')


def shards(folder, monkeypatch, cache, **settings):
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(folder / cache))
    corpus = local_files.corpus(str(folder / '[abc].*'), **settings)
    paths = corpus.shards('train') + corpus.shards('validation')
    return {os.path.basename(path): pathlib.Path(path).read_bytes() for path in paths}


@pytest.mark.parametrize('txt_documents', ['paragraph', 'passage'])
def test_two_processes_write_the_same_files(tmp_path, monkeypatch, capsys, request, txt_documents):
    write(tmp_path)
    one = shards(tmp_path, monkeypatch, 'one', txt_documents=txt_documents)
    said = capsys.readouterr().err.splitlines()[-1].rpartition(' (')[0]
    assert 'b.jsonl:201: invalid JSON' in said and ', 2 empty skipped' in said
    request.getfixturevalue('two_processes')
    assert shards(tmp_path, monkeypatch, 'two', txt_documents=txt_documents) == one
    assert capsys.readouterr().err.splitlines()[-1].rpartition(' (')[0] == said


@pytest.mark.parametrize(
    ('settings', 'said'),
    [({'strict': True}, r'b.jsonl:201: invalid JSON'), ({'field': 'body'}, "has no field 'body'")],
)
def test_a_mistake_in_a_part_is_one_line(tmp_path, two_processes, settings, said):
    write(tmp_path)
    with pytest.raises(UserError, match=said) as error:
        local_files.corpus(str(tmp_path / 'b.jsonl'), **settings).shards('train')
    assert '\n' not in str(error.value)


def end(how):
    """What a worker does."""
    if how == 'killed':
        os.kill(os.getpid(), signal.SIGKILL)
    yield how
    if how == 'fault':
        raise ZeroDivisionError


def test_a_worker_that_ends_is_an_error():
    assert list(workers.in_order([(end, ('fine',)), (end, ('well',))] * 3, 2)) == ['fine', 'well'] * 3
    with pytest.raises(UserError, match='ended with exit code -9') as error:
        list(workers.in_order([(end, ('fine',)), (end, ('killed',))], 2))
    assert '\n' not in str(error.value)
    with pytest.raises(RuntimeError, match='ZeroDivisionError'):
        list(workers.in_order([(end, ('fault',))], 1))


def busy():
    """What a worker does that has no result for hours; its Python never waits."""
    yield os.getpid()
    while True:
        sum(range(1000))


STARTS_A_WORKER = """
from remixer_tasks.files import workers
from tests.remixer_tasks import test_parts
with workers.Workers(1) as pool:
    results = pool.results(test_parts.busy)
    print(next(results), flush=True)
    next(results)
"""


def test_a_busy_worker_ends_with_its_killed_command():
    command = [sys.executable, '-c', STARTS_A_WORKER]
    with subprocess.Popen(command, env=paths.environment(), stdout=subprocess.PIPE, text=True) as process:
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
    worker.wait(60)
