"""A run reads the first volumes of its text while another process writes the later ones, and always in one order."""

import collections
import contextlib
import errno
import gc
import json
import os
import pathlib
import signal
import threading

import pytest
import seqio
import tensorflow as tf

from remixer_t5x import tf_data
from remixer_t5x.data import fingerprint, pipeline, stream, task_batches
from remixer_t5x.errors import UserError
from remixer_tasks import local_files, pretraining
from remixer_tasks.corpora import growing_source, growing_text, parsing, text_corpus, text_shards, volumes
from remixer_tasks.files import cache, parts, workers
from tests.support import real_processes

COUNT = 5
LENGTHS = {'inputs': 24, 'targets': 10}


class InThisProcess:
    """Stands in for `workers.Workers`, whose processes take seconds to start: the work is done by the thread."""

    def __init__(self, count):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def results(self, function, *arguments):
        return function(*arguments)


class Gate:
    """Lets as many volumes of training text be finished as were let through."""

    def __init__(self, patch):
        self._condition, self._through = threading.Condition(), 0
        finish = volumes.Volumes._finish

        def wait(own, folder, number, progress):
            if own.folder.name == 'train':
                with self._condition:
                    self._condition.wait_for(lambda: number < self._through)
            finish(own, folder, number, progress)

        patch.setattr(volumes.Volumes, '_finish', wait)

    def let_through(self, count):
        with self._condition:
            self._through = count
            self._condition.notify_all()


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """Two files of text whose documents are in COUNT volumes."""
    folder = tmp_path_factory.mktemp('text')
    documents = [f'the word {number * 7919 % 10007} is number {number}' for number in range(400)]
    for name, some in (('a', documents[:150]), ('b', documents[150:])):
        (folder / f'{name}.jsonl').write_text('\n'.join(json.dumps({'text': document}) for document in some))
    return folder


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Small volumes, and a cache of the test's own."""
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(parts, 'BYTES', 400)
    monkeypatch.setattr(parsing, 'VOLUME', 3_000)
    monkeypatch.setattr(text_shards, 'SHARDS', 4)
    monkeypatch.setattr(growing_text, 'SHARDS', 4)
    monkeypatch.setattr(growing_source, '_TOGETHER', 2)
    monkeypatch.setattr(growing_text, '_LOOK_SECONDS', 0.01)
    monkeypatch.setattr(volumes.temporary, 'sync', lambda path: None)
    yield
    growing_text._writings.clear()


@pytest.fixture
def gate(small, monkeypatch):
    monkeypatch.setattr(workers, 'Workers', InThisProcess)
    gate = Gate(monkeypatch)
    yield gate
    # A stream that a traceback holds would begin to write again, in a process of its own.
    gc.collect()
    gate.let_through(COUNT)
    for thread in threading.enumerate():
        if thread.name == 'growing corpus':
            thread.join()


def corpus(text, **changed):
    settings = {'validation_fraction': 0.1, 'train_while_reading': True} | changed
    return local_files.corpus(str(text / '*.jsonl'), **settings)


def documents(dataset):
    return [example['text'].decode() for example in tf_data.arrays(dataset)]


def new_cache(monkeypatch, folder):
    growing_text._writings.clear()
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(folder))


def reader(corpus, shuffle=True, **more):
    """A stream of its training documents, without end."""
    with stream.restorable():
        dataset = corpus.source().get_dataset('train', shuffle, seed=1, **more).repeat()
    return stream.Stream(dataset, 'growing text')


def draw(documents, count):
    return [next(documents)['text'].numpy().decode() for _ in range(count)]


def written(corpus):
    return {str(path.relative_to(corpus.folder)): path.read_bytes() for path in corpus.folder.glob('*/*/*')}


def test_each_document_is_in_one_split_and_held_out_are_those_of_the_first_volume(text, gate):
    gate.let_through(COUNT)
    growing = corpus(text)
    assert isinstance(growing, growing_text.GrowingCorpus) and growing.text.source().count == COUNT
    source = growing.source()
    train = documents(source.get_dataset('train', shuffle=False))
    held_out = documents(source.get_dataset('validation', shuffle=False))
    everything = [json.loads(line)['text'] for path in text.iterdir() for line in path.read_text().splitlines()]
    low = {document for document in everything if text_shards.share_of(document.encode()) < 0.1}
    assert sorted(train) == sorted(set(everything) - low)
    first = [path for path in growing.shards('train') if '/000000/' in path]
    assert set(held_out) < low and len(held_out) > 2 and len(first) == 4
    # A vocabulary is trained on the first volume.
    assert sorted(growing.training_documents()) == sorted(train[: len(list(growing.training_documents()))])
    # Documents are shuffled in each file of a volume.
    numbers = [int(record.split()[-1]) for record in text_shards.read(first[0])]
    assert len(numbers) > 10 and numbers != sorted(numbers)


@pytest.mark.parametrize('shuffle', [True, False])
def test_the_order_does_not_depend_on_when_a_volume_is_ready(text, gate, tmp_path, monkeypatch, shuffle):
    gate.let_through(COUNT)
    count = len(documents(corpus(text).source().get_dataset('train', shuffle=False)))
    expected = draw(reader(corpus(text), shuffle), 2 * count)
    assert collections.Counter(expected[:count]) == collections.Counter(expected[count:])
    assert (expected[:count] != expected[count:]) == shuffle
    gate.let_through(1)
    new_cache(monkeypatch, tmp_path / 'slow')
    # The first documents are there before the second volume is.
    found = draw(slow := reader(corpus(text), shuffle), 20)
    assert not any(corpus(text).folder.glob('train/000001'))
    for through in range(2, COUNT + 1):
        gate.let_through(through)
        found += draw(slow, 40)
    assert found == expected[: len(found)]


def test_a_position_saved_early_is_restored_when_all_is_there(text, gate, tmp_path, monkeypatch):
    gate.let_through(1)
    early = reader(corpus(text))
    draw(early, 10)
    position = early.capture()
    gate.let_through(COUNT)
    expected = draw(early, 600)
    growing_text._writings.clear()
    late = reader(corpus(text))
    late.restore(position)
    assert draw(late, 600) == expected


def test_hosts_share_the_documents_and_start_with_the_first_volume(text, gate):
    gate.let_through(1)
    starts = [draw(reader(corpus(text), shard_info=seqio.ShardInfo(index, 4)), 3) for index in range(4)]
    assert len(set(sum(starts, []))) == 12
    gate.let_through(COUNT)
    source = corpus(text).source()
    whole = documents(source.get_dataset('train', shuffle=False))
    shares = [
        documents(source.get_dataset('train', shuffle=True, seed=0, shard_info=seqio.ShardInfo(index, 3)))
        for index in range(3)
    ]
    assert all(shares) and sorted(sum(shares, [])) == sorted(whole)


def test_an_emptied_cache_is_filled_again_before_a_position_is_restored(text, gate, tmp_path, monkeypatch):
    gate.let_through(COUNT)
    config = pipeline.DatasetConfig(task(corpus(text)), LENGTHS, 4, seed=1)
    batches = task_batches.TrainBatches(config)
    # The tokenizer reads 256 documents ahead, so the position is in the fourth volume.
    for _ in range(5):
        next(batches)
    position = batches.capture()
    expected = [next(batches)['decoder_target_tokens'].tolist() for _ in range(20)]
    del batches
    gc.collect()
    growing_text._writings.clear()
    cache.temporary.remove(corpus(text).folder)
    gate.let_through(1)
    restored = task_batches.TrainBatches(pipeline.DatasetConfig(task(corpus(text)), LENGTHS, 4, seed=1))
    mend = growing_source.GrowingSource.mend
    monkeypatch.setattr(growing_source.GrowingSource, 'mend', lambda *given: (gate.let_through(COUNT), mend(*given))[1])
    restored.restore(position)
    assert [next(restored)['decoder_target_tokens'].tolist() for _ in range(20)] == expected


def task(text):
    return pretraining.span_corruption(text, seqio.ByteVocabulary(100), 'growing', shuffle_buffer_size=16)


def test_a_reader_that_waits_can_be_stopped(text, gate, capfd):
    gate.let_through(1)
    source = corpus(text).source()
    rest = iter(tf_data.without_autotune(source.get_dataset('train', shuffle=False).prefetch(1000)))
    next(rest)
    while 'waiting for volume 2 of 5' not in capfd.readouterr().err:
        growing_text.time.sleep(0.01)
    # The prefetching thread looks for the second volume, which does not come; this must not hang.
    del rest
    gc.collect()
    assert not any(corpus(text).folder.glob('train/000001'))


def test_what_is_wrong_with_a_later_volume_ends_the_run_in_one_line(text, gate, tmp_path):
    for path in text.iterdir():
        (tmp_path / path.name).write_text(path.read_text() + '\n{"text": "cut')
    gate.let_through(COUNT)
    with pytest.raises(UserError, match=r'failed after \d+ batches.*jsonl:\d+: .*STRICT = False') as error:
        draw(reader(corpus(tmp_path, strict=True)), 400)
    assert '\n' not in str(error.value)
    growing_text._writings.clear()
    assert len(set(draw(reader(corpus(tmp_path)), 400))) > 300


@pytest.mark.parametrize(
    ('fault', 'said'),
    [
        (tf.errors.ResourceExhaustedError(None, None, 'disk'), 'no space left in the cache .*: free some'),
        (OSError(errno.ENOSPC, 'disk'), 'cannot write to the cache .*: set REMIXER_T5X_CACHE'),
        (RuntimeError('a worker failed:\nTraceback\nValueError: 7'), 'cannot be read: ValueError: 7'),
    ],
)
def test_what_stops_the_writer_is_told_where_the_run_needs_the_volume(text, gate, monkeypatch, fault, said):
    add = text_shards.Shards.add

    def fails_later(shards, *document):
        if (shards._folder.parent / '000001').exists():
            raise fault
        add(shards, *document)

    monkeypatch.setattr(text_shards.Shards, 'add', fails_later)
    gate.let_through(COUNT)
    documents = reader(corpus(text))
    # Documents of the first two volumes come as if nothing had happened.
    assert len(set(draw(documents, 100))) == 100
    with pytest.raises(UserError, match=rf'failed after \d+ batches.*{said}') as error:
        draw(documents, 400)
    assert '\n' not in str(error.value)


def test_nothing_held_out_is_a_mistake_in_one_line(text, gate, tmp_path):
    gate.let_through(COUNT)
    with pytest.raises(UserError, match='no document in the first volume of 2 files .* VALIDATION_FILES, or a larger'):
        corpus(text, validation_fraction=1e-9).shards('train')
    with pytest.raises(UserError, match=r'the held-out share is 0\.0, allowed is above 0'):
        corpus(text, validation_fraction=0.0)
    (tmp_path / 'other.txt').write_text('some held-out\n\ntext')
    growing = corpus(text, validation_fraction=0.0, validation_files=str(tmp_path / 'other.txt'))
    assert sorted(documents(growing.source().get_dataset('validation'))) == ['some held-out', 'text']
    assert len(documents(growing.source().get_dataset('train'))) == 400


def test_text_of_one_volume_is_read_as_a_whole(text, small, monkeypatch):
    monkeypatch.setattr(parsing, 'VOLUME', 1 << 30)
    assert isinstance(corpus(text), text_corpus.ParsedCorpus)


def test_a_damaged_record_is_named_with_its_file(text, gate):
    gate.let_through(COUNT)
    growing = corpus(text)
    path = pathlib.Path(growing.shards('train')[0])
    data = bytearray(path.read_bytes())
    data[20] ^= 255
    path.write_bytes(data)
    assert f'the damaged file is {path}' in fingerprint.find_damaged_file(task(growing), 'train')
    assert f'delete the folder {growing.folder}' in fingerprint.find_damaged_file(task(growing), 'train')


def test_a_volume_that_was_cut_off_is_written_again(text, gate, monkeypatch):
    gate.let_through(COUNT)
    growing = corpus(text)
    expected = written_when_done(growing)
    (path,) = growing.folder.glob('train/000002/train-00001-*')
    path.write_bytes(path.read_bytes()[:-3])
    growing_text._writings.clear()
    assert written_when_done(growing) == expected


def written_when_done(growing):
    for path in growing.shards('train'):
        while not growing.is_there(path):
            pass
    return written(growing)


def read_until_killed(text, folder):
    """The process that is killed: its run has the first volume, and another process writes the others."""
    os.environ['REMIXER_T5X_CACHE'] = str(folder)
    parts.BYTES, parsing.VOLUME = 400, 3_000
    growing = corpus(text)
    print(draw(reader(growing), 5), flush=True)
    signal.pause()


def test_real_processes_one_is_killed_and_the_next_has_the_same_text(text, tmp_path, monkeypatch, compiled):
    """Nothing is replaced here but the size of a volume."""
    process = real_processes.Process(read_until_killed, text, tmp_path / 'cache', output=tmp_path / 'log')
    process.until(lambda: 'the word' in process.output())
    assert process.kill() == -signal.SIGKILL
    monkeypatch.setattr(parts, 'BYTES', 400)
    monkeypatch.setattr(parsing, 'VOLUME', 3_000)
    for folder in ('cache', 'other'):
        new_cache(monkeypatch, tmp_path / folder)
        growing = corpus(text)
        found = draw(reader(growing), 300)
        if folder == 'cache':
            continued = found, written_when_done(growing)
    assert continued == (found, written_when_done(growing))
    assert str(found[:5]) in process.output()
    with contextlib.suppress(tf.errors.OpError):
        growing_text._writings.clear()
