"""Text that several processes parse into the cache: the same documents for any number of processes and kills."""

import contextlib
import json
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

from remixer_t5x import temporary, tf_data
from remixer_t5x.data import stream
from remixer_t5x.errors import UserError
from remixer_tasks import local_files
from remixer_tasks.corpora import arrow_files, documents
from remixer_tasks.files import cache, workers
from remixer_tasks.files.malformed import Malformed
from tests.support import paths, real_processes

DOCUMENTS = [f'the word {number * 7919 % 10007} is next to\n{number}' for number in range(240)]


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """A folder of files; two lines cannot be read, one has no text, and one file has none."""
    folder = tmp_path_factory.mktemp('text')
    for number in range(12):
        (folder / f'{number:02d}.txt').write_text('\n\n'.join(DOCUMENTS[number * 15 : (number + 1) * 15]))
    (folder / 'empty.txt').write_text('\n\n\n')
    rows = [json.dumps({'text': document}) for document in DOCUMENTS[180:]]
    rows[10:10] = ['{"text": "cut', '{"text": " "}']
    rows[50:50] = ['7']
    (folder / 'rows.jsonl').write_text('\n'.join(rows))
    return folder


@pytest.fixture
def small_jobs(monkeypatch):
    """Each file is parsed by a job, as if it were large, and there are two processes."""
    monkeypatch.setattr(documents, 'JOB_BYTES', 200)
    monkeypatch.setattr(workers, 'count_cores', lambda: 2)
    # Nothing here survives the machine, and syncing takes most of the time.
    monkeypatch.setattr(temporary, 'sync', lambda path: None)


def corpus_of(text, **settings):
    return local_files.corpus(
        str(text / '*.*'), **{'txt_documents': 'paragraph', 'validation_fraction': 0.1} | settings
    )


def texts(corpus, split):
    found = corpus.documents(split)
    return [document.decode() for document in found.at(np.arange(len(found)))]


def both(corpus):
    return texts(corpus, 'train'), texts(corpus, 'validation')


def in_this_process(function, jobs, count):
    """`workers.map_in_order` without other processes."""
    return (function(*job) for job in jobs)


def test_several_processes_return_the_documents_of_one_in_order(text, tmp_path, small_jobs, monkeypatch, capsys):
    corpus = corpus_of(text)
    assert len(corpus.read) > 10
    train, held_out = both(corpus)
    message = capsys.readouterr().err.splitlines()[-1]
    assert '2 malformed skipped' in message and ', 2 empty skipped' in message
    assert 'rows.jsonl:11: invalid JSON' in message and 'rows.jsonl:51: the line is not a JSON object' in message
    assert sorted(train + held_out) == sorted(DOCUMENTS) and 8 < len(held_out) < 50
    order = {document: number for number, document in enumerate(DOCUMENTS)}
    assert train == sorted(train, key=order.__getitem__)
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'other'))
    monkeypatch.setattr(workers, 'map_in_order', in_this_process)
    assert both(corpus_of(text)) == (train, held_out)
    assert capsys.readouterr().err.splitlines()[-1].rpartition(' (')[0] == message.rpartition(' (')[0]


def test_a_user_error_in_a_worker_is_reported(text, small_jobs):
    with pytest.raises(UserError, match='empty.txt:1: the text is empty') as error:
        corpus_of(text, strict=True).files('train')
    assert '\n' not in str(error.value)


class Killed(BaseException):
    """Ends a parse as a kill does, as far as its files are concerned."""


def kill_after(patch, count):
    """The parse ends before the next of `count` changes to its folder."""
    left = [count]

    def counted(change):
        def act(*given, **named):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return change(*given, **named)

        return act

    patch.setattr(arrow_files, '_record_batch', counted(arrow_files._record_batch))
    patch.setattr(os, 'replace', counted(os.replace))
    patch.setattr(np, 'save', counted(np.save))
    patch.setattr(cache, 'mark_complete', counted(cache.mark_complete))


@pytest.mark.parametrize('how', ['by hash', 'in files'])
def test_a_parse_killed_at_any_place_is_completed(tmp_path, small_jobs, monkeypatch, how):
    text = tmp_path / 'text'
    text.mkdir()
    for number in range(4):
        (text / f'{number}.txt').write_text(f'document {number} \n\n other {number} ' * 20)
    (tmp_path / 'other.txt').write_text('\n\n'.join(f'held out {number} ' * 20 for number in range(6)))
    # The share holds nothing out by itself.
    held_out = {'validation_files': str(tmp_path / 'other.txt')} if how == 'in files' else {'validation_fraction': 1e-9}
    monkeypatch.setattr(workers, 'map_in_order', in_this_process)
    expected = both(corpus_of(text, **held_out))
    for kill_at in range(100):
        monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / f'killed {kill_at}'))
        with pytest.MonkeyPatch.context() as patch:
            kill_after(patch, kill_at)
            with contextlib.suppress(Killed):
                corpus_of(text, **held_out).files('train')
                break
        assert both(corpus_of(text, **held_out)) == expected
        assert len(os.listdir(cache.root() / 'corpora')) == 1
    assert 8 < kill_at < 99


def parse_until_the_fifth_part(text, folder):
    """The process that is killed."""
    os.environ['REMIXER_T5X_CACHE'] = str(folder)
    documents.JOB_BYTES, workers.count_cores = 200, lambda: 2
    add_counts, parts = Malformed.add_counts, []

    def stop(malformed, counts):
        add_counts(malformed, counts)
        parts.append(counts)
        if len(parts) == 5:
            print('half read', flush=True)
            signal.pause()

    Malformed.add_counts = stop
    corpus_of(text).files('train')


def test_a_killed_process_leaves_complete_parts_to_the_next(text, tmp_path, small_jobs, monkeypatch):
    expected = both(corpus_of(text))
    process = real_processes.Process(parse_until_the_fifth_part, text, tmp_path / 'killed', output=tmp_path / 'log')
    process.until(lambda: 'half read' in process.output())
    assert process.kill() == -signal.SIGKILL
    (folder,) = (tmp_path / 'killed' / 'corpora').iterdir()
    before = {path: path.stat().st_mtime_ns for path in folder.glob('*.arrow')}
    assert len(before) >= 5
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'killed'))
    corpus = corpus_of(text)
    assert both(corpus) == expected
    after = [corpus.folder() / path.name for path in before]
    assert [path.stat().st_mtime_ns for path in after] == list(before.values())
    assert not list(corpus.folder().glob('*.unfinished'))


@pytest.mark.parametrize('damage', ['', 'cut'])
def test_a_damaged_part_is_parsed_again(text, tmp_path, small_jobs, monkeypatch, damage):
    monkeypatch.setattr(workers, 'map_in_order', in_this_process)
    expected = both(corpus_of(text))
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'again'))
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
        kill_after(patch, 20)
        corpus_of(text).files('train')
    path = next((tmp_path / 'again').glob('corpora/*/documents-00003.arrow'))
    path.write_bytes(path.read_bytes()[:-30] if damage == 'cut' else b'')
    assert both(corpus_of(text)) == expected


def test_a_file_that_changes_while_it_is_parsed_is_rejected(tmp_path, small_jobs, monkeypatch):
    (tmp_path / 'a.txt').write_text('\n\n'.join(DOCUMENTS))
    corpus = corpus_of(tmp_path)
    (tmp_path / 'a.txt').write_text('other\n\ntext')
    with pytest.raises(UserError, match=r'a.txt changed while it was read; run the command again') as error:
        corpus.files('train')
    assert '\n' not in str(error.value)


def test_a_full_disk_is_reported(text, monkeypatch):
    write = arrow_files.write
    monkeypatch.setattr(arrow_files, 'write', lambda path, *given: write(pathlib.Path('/dev/full'), *given))
    with pytest.raises(UserError, match='set REMIXER_T5X_CACHE to a writable folder') as error:
        corpus_of(text).files('train')
    assert '\n' not in str(error.value)


def test_a_second_process_waits_for_the_first(tmp_path, capsys):
    """Here another thread, with its own lock."""
    found = []

    def second():
        with cache.fill_entry(tmp_path / 'entry', 'some text') as is_unsealed:
            found.append(is_unsealed)

    with cache.fill_entry(tmp_path / 'entry', 'some text') as is_unsealed:
        thread = threading.Thread(target=second)
        thread.start()
        while 'waiting for another process that parses some text' not in capsys.readouterr().err:
            time.sleep(0.01)
        cache.mark_complete(tmp_path / 'entry')
    thread.join()
    assert is_unsealed and found == [False]


def test_documents_are_memory_mapped_and_not_part_of_a_position(tmp_path):
    path = tmp_path / 'a.arrow'
    arrow_files.write(path, (b'%07d' % number * 1000 for number in range(5000)), lambda: '')
    before = pa.total_allocated_bytes()
    found = arrow_files.Documents([path])
    assert found.at(np.array([4999, 0, 2500])).tolist() == [b'%07d' % number * 1000 for number in (4999, 0, 2500)]
    assert path.stat().st_size > 35_000_000 and pa.total_allocated_bytes() - before < 1_000_000

    def read():
        dataset = found.dataset(7, seqio.ShardInfo(1, 2), repeat=True)
        return stream.Stream(tf_data.without_autotune(dataset), 'text')

    unbroken = read()
    for _ in range(3000):
        next(unbroken)
    state, again = unbroken.capture(), read()
    again.restore(state)
    assert len(state) < 5000
    assert [next(again).numpy() for _ in range(200)] == [next(unbroken).numpy() for _ in range(200)]


def end(how):
    """What a worker does."""
    if how == 'killed':
        os.kill(os.getpid(), signal.SIGKILL)
    if how == 'fault':
        raise ZeroDivisionError
    return how


def test_a_killed_or_failing_worker_raises_an_error():
    assert list(workers.map_in_order(end, [('fine',), ('well',)] * 3, 2)) == ['fine', 'well'] * 3
    with pytest.raises(UserError, match='was killed; if memory ran out') as error:
        list(workers.map_in_order(end, [('fine',), ('killed',)], 2))
    assert '\n' not in str(error.value)
    with pytest.raises(RuntimeError, match='ZeroDivisionError'):
        list(workers.map_in_order(end, [('fault',)], 1))


def write_pid_and_work(path):
    """What a worker does that has no result for hours; its Python never waits."""
    pathlib.Path(path).write_text(f'{os.getpid()}\n')
    while True:
        sum(range(1000))


STARTS_A_WORKER = """
import sys
from remixer_tasks.files import workers
from tests.remixer_tasks import test_parsed_text
list(workers.map_in_order(test_parsed_text.write_pid_and_work, [(sys.argv[1],)], 1))
"""


def test_a_busy_worker_ends_with_its_killed_command(tmp_path):
    command = [sys.executable, '-c', STARTS_A_WORKER, str(tmp_path / 'pid')]
    with subprocess.Popen(command, env=paths.environment()) as process:
        while not (tmp_path / 'pid').exists() or not (tmp_path / 'pid').read_text().endswith('\n'):
            assert process.poll() is None
            time.sleep(0.1)
        worker = psutil.Process(int((tmp_path / 'pid').read_text()))
        process.kill()
    worker.wait(60)
