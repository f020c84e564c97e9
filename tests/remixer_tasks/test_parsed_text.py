"""Parsing text into the cache gives the same documents for any number of processes and after any kill."""

import contextlib
import json
import operator
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pyarrow as pa
import pytest
import seqio

from remixer_t5x import temporary_files, tf_data
from remixer_t5x.data import resumable_iterator
from remixer_tasks import local_files
from remixer_tasks.corpora import arrow_files
from remixer_tasks.files import cache, workers
from tests.support import paths
from tests.support.error_lines import error_message

DOCUMENTS = [f'the word {number * 7919 % 10007} is next to\n{number}' for number in range(240)]


@pytest.fixture(scope='module')
def text_folder(tmp_path_factory):
    """Returns a folder of text files with two malformed lines and an empty text."""
    folder = tmp_path_factory.mktemp('text')
    for number in range(12):
        (folder / f'{number:02d}.txt').write_text('\n\n'.join(DOCUMENTS[number * 15 : (number + 1) * 15]))
    rows = [json.dumps({'text': document}) for document in DOCUMENTS[180:]]
    rows[10:10] = ['{"text": "cut', '{"text": " "}']
    rows[50:50] = ['7']
    (folder / 'rows.jsonl').write_text('\n'.join(rows))
    return folder


@pytest.fixture
def small_jobs(monkeypatch):
    """Parses the files with many small jobs in two processes."""
    monkeypatch.setattr(local_files, 'JOB_BYTES', 200)
    monkeypatch.setattr(workers, 'count_cores', lambda: 2)
    # Syncing files to the disk would take most of the time.
    monkeypatch.setattr(temporary_files, 'sync_to_disk', lambda path: None)


def corpus_of(text_folder, **settings):
    return local_files.corpus(
        str(text_folder / '*.*'), **{'txt_documents': 'paragraph', 'validation_fraction': 0.1} | settings
    )


def texts(corpus, split):
    split_documents = corpus.open_documents(split)
    return [document.decode() for document in split_documents.read_documents(np.arange(len(split_documents)))]


def both_splits(corpus):
    return texts(corpus, 'train'), texts(corpus, 'validation')


def map_in_this_process(function, jobs, count):
    """Replaces `workers.map_in_order` without starting processes."""
    return (function(*job) for job in jobs)


def test_several_processes_return_the_documents_of_one_in_order(text_folder, tmp_path, small_jobs, monkeypatch, capsys):
    corpus = corpus_of(text_folder)
    assert len(corpus.read) > 10
    train, held_out = both_splits(corpus)
    message = capsys.readouterr().err.splitlines()[-1]
    assert '2 malformed skipped' in message and ', 1 empty skipped' in message
    assert 'rows.jsonl:11: invalid JSON' in message and 'rows.jsonl:51: the line is not a JSON object' in message
    assert sorted(train + held_out) == sorted(DOCUMENTS) and 8 < len(held_out) < 50
    order = {document: number for number, document in enumerate(DOCUMENTS)}
    assert train == sorted(train, key=order.__getitem__)
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'other'))
    monkeypatch.setattr(workers, 'map_in_order', map_in_this_process)
    assert both_splits(corpus_of(text_folder)) == (train, held_out)
    assert capsys.readouterr().err.splitlines()[-1].rpartition(' (')[0] == message.rpartition(' (')[0]


def test_a_user_error_in_a_worker_is_reported(text_folder, small_jobs):
    assert 'rows.jsonl:11: invalid JSON' in error_message(corpus_of(text_folder, strict=True).list_files, 'train')


class Killed(BaseException):
    """Interrupts a parse, which leaves the same files as a kill."""


def kill_after(patch, count):
    """Raises `Killed` in place of a change to the folder, after `count` changes."""
    remaining = [count]

    def counting(change):
        def wrapper(*args, **kwargs):
            remaining[0] -= 1
            if remaining[0] < 0:
                raise Killed
            return change(*args, **kwargs)

        return wrapper

    patch.setattr(arrow_files, '_build_record_batch', counting(arrow_files._build_record_batch))
    patch.setattr(os, 'replace', counting(os.replace))
    patch.setattr(np, 'save', counting(np.save))
    patch.setattr(cache, 'mark_entry_complete', counting(cache.mark_entry_complete))


def test_a_parse_killed_at_any_change_is_completed(tmp_path, small_jobs, monkeypatch):
    text_folder = tmp_path / 'text'
    text_folder.mkdir()
    for number in range(4):
        (text_folder / f'{number}.txt').write_text(f'document {number} \n\n other {number} ' * 20)
    (tmp_path / 'other.txt').write_text('\n\n'.join(f'held out {number} ' * 20 for number in range(6)))
    held_out = {'validation_files': str(tmp_path / 'other.txt')}
    monkeypatch.setattr(workers, 'map_in_order', map_in_this_process)
    expected = both_splits(corpus_of(text_folder, **held_out))
    for kill_at in range(100):
        monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / f'killed {kill_at}'))
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, kill_at)
            with contextlib.suppress(Killed):
                corpus_of(text_folder, **held_out).list_files('train')
                break
        assert both_splits(corpus_of(text_folder, **held_out)) == expected
        assert len(os.listdir(cache.get_cache_root() / 'corpora')) == 1
    assert 8 < kill_at < 99


def test_after_a_kill_only_missing_and_damaged_parts_are_parsed(text_folder, tmp_path, small_jobs, monkeypatch):
    monkeypatch.setattr(workers, 'map_in_order', map_in_this_process)
    expected = both_splits(corpus_of(text_folder))
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'again'))
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        kill_after(patch, 20)
        corpus_of(text_folder).list_files('train')
    (folder,) = (tmp_path / 'again' / 'corpora').iterdir()
    truncated = folder / 'documents-00003.arrow'
    truncated.write_bytes(truncated.read_bytes()[:-30])
    complete = {part: part.stat().st_mtime_ns for part in folder.glob('*.arrow') if part != truncated}
    assert len(complete) >= 5
    assert both_splits(corpus_of(text_folder)) == expected
    assert {part: part.stat().st_mtime_ns for part in complete} == complete
    assert not list(folder.glob('*.tmp*'))


def test_a_file_that_changes_while_it_is_parsed_is_rejected(tmp_path, small_jobs, monkeypatch):
    (tmp_path / 'a.txt').write_text('\n\n'.join(DOCUMENTS))
    corpus = corpus_of(tmp_path)
    (tmp_path / 'a.txt').write_text('other\n\ntext')
    assert 'a.txt changed while it was read' in error_message(corpus.list_files, 'train')


def test_a_full_disk_is_reported(text_folder, monkeypatch):
    write = arrow_files.write_documents
    monkeypatch.setattr(arrow_files, 'write_documents', lambda path, *args: write(pathlib.Path('/dev/full'), *args))
    assert 'set REMIXER_T5X_CACHE to a' in error_message(corpus_of(text_folder).list_files, 'train')


def test_a_second_process_waits_for_the_first(tmp_path, capsys):
    """The second process is a thread with a separate lock."""
    entry, results = tmp_path / 'entry', []

    def fill_again():
        with cache.lock_cache_entry(entry, 'some text') as is_incomplete:
            results.append(is_incomplete)

    thread = threading.Thread(target=fill_again)
    with cache.lock_cache_entry(entry, 'some text') as is_incomplete:
        thread.start()
        while 'waiting for another process that prepares some text' not in capsys.readouterr().err:
            time.sleep(0.01)
        cache.mark_entry_complete(entry)
    thread.join()
    assert is_incomplete and results == [False]


def test_documents_are_memory_mapped_and_not_part_of_a_position(tmp_path):
    path = tmp_path / 'a.arrow'
    arrow_files.write_documents(path, ((b'%07d' % number * 1000, None) for number in range(5000)), lambda: '')
    before = pa.total_allocated_bytes()
    mapped = arrow_files.ArrowDocuments([path])
    numbers = [4999, 0, 2500]
    assert mapped.read_documents(np.array(numbers)).tolist() == [b'%07d' % number * 1000 for number in numbers]
    assert path.stat().st_size > 35_000_000 and pa.total_allocated_bytes() - before < 1_000_000

    def open_stream():
        dataset = mapped.build_dataset(7, seqio.ShardInfo(1, 2), repeat=True)
        return resumable_iterator.ResumableIterator(tf_data.disable_autotune(dataset), 'text')

    unbroken = open_stream()
    for _ in range(3000):
        next(unbroken)
    state, again = unbroken.capture_position(), open_stream()
    again.restore_position(state)
    assert len(state) < 5000
    assert [next(again).numpy() for _ in range(200)] == [next(unbroken).numpy() for _ in range(200)]


def test_a_killed_or_failing_worker_raises_an_error():
    assert list(workers.map_in_order(str, [('fine',), ('well',)] * 3, 2)) == ['fine', 'well'] * 3
    # Signal 0 has no effect.
    killed = workers.map_in_order(signal.raise_signal, [(0,), (signal.SIGKILL,)], 2)
    assert 'was killed; if memory ran out' in error_message(list, killed)
    with pytest.raises(RuntimeError, match='ZeroDivisionError'):
        list(workers.map_in_order(operator.truediv, [(1, 0)], 1))


WORKER_PROGRAM = """
import runpy, sys
from remixer_tasks.files import workers
list(workers.map_in_order(runpy.run_path, [(sys.argv[1],)], 1))
"""


def test_a_busy_worker_ends_after_its_command_is_killed(tmp_path):
    pid, program = tmp_path / 'pid', tmp_path / 'busy.py'
    program.write_text(
        f"import os, pathlib\npathlib.Path({str(pid)!r}).write_text(f'{{os.getpid()}}!')\nwhile True: sum(range(1000))"
    )
    command = [sys.executable, '-c', WORKER_PROGRAM, str(program)]
    with subprocess.Popen(command, env=paths.environment()) as process:
        while not pid.exists() or not pid.read_text().endswith('!'):
            assert process.poll() is None
            time.sleep(0.1)
        worker = psutil.Process(int(pid.read_text()[:-1]))
        process.kill()
    worker.wait(60)
