"""The fingerprint of a run's data, its differences, and errors that name unreadable files."""

import json
import os
import pathlib
import shutil

import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.data import fingerprint as fingerprints
from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.errors import UserError
from tests.data.test_pipeline import LENGTHS, texts_task


def task(name, source):
    feature = seqio.Feature(seqio.ByteVocabulary())
    return seqio.Task(name, source=source, output_features={'targets': feature}, preprocessors=[])


def lines_task(folder, name='lines'):
    return task(name, seqio.TextLineDataSource({'train': str(folder / '*' / '*.txt')}))


def fingerprint(folder):
    return fingerprints.fingerprint_data(lines_task(folder), 'train')


@pytest.fixture
def folder(tmp_path):
    for part in ('a', 'b'):
        (tmp_path / 'first' / part).mkdir(parents=True)
        for number in range(3):
            (tmp_path / 'first' / part / f'{number}.txt').write_text(f'{part} {number}\n' * 9)
    return tmp_path / 'first'


def test_a_copy_in_another_folder_has_the_same_fingerprint(folder, tmp_path):
    before = fingerprint(folder)
    other = shutil.copytree(folder, tmp_path / 'some' / 'where' / 'else')
    for path in other.rglob('*.txt'):
        os.utime(path, (1, 1))
    assert fingerprint(other) == before == json.loads(json.dumps(before))
    assert fingerprints.describe_data_difference(before, fingerprint(other)) is None
    assert before['lines']['files'] == 6 and list(before['lines']['each'])[:2] == ['a/0.txt', 'a/1.txt']


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (lambda path: path.write_text('b 2\n' * 9), 'now: 6 files'),
        (pathlib.Path.unlink, 'before: 6 files read by TextLineDataSource; now: 5 files'),
        (lambda path: path.rename(path.with_name('7.txt')), ''),
    ],
)
def test_differences_are_described(folder, tmp_path, change, words):
    # Changes a copy, because seqio lists a pattern's files once.
    copy = shutil.copytree(folder, tmp_path / 'copy')
    change(copy / 'b' / '1.txt')
    difference = fingerprints.describe_data_difference(fingerprint(folder), fingerprint(copy))
    assert difference.startswith('task lines has different files, beginning with b/1.txt (before: 6 files')
    assert words in difference and '\n' not in difference


@pytest.mark.parametrize('position', [5, fingerprints.WHOLE_BYTES])
def test_start_and_end_of_a_large_file_are_hashed(tmp_path, position):
    (tmp_path / 'a').mkdir()
    large = tmp_path / 'a' / 'large.txt'
    large.write_bytes(b'x' * (fingerprints.WHOLE_BYTES + 10))
    before = fingerprint(tmp_path)
    with open(large, 'r+b') as file:
        file.seek(position)
        file.write(b'y')
    assert 'beginning with large.txt' in fingerprints.describe_data_difference(before, fingerprint(tmp_path))


def test_a_mixture_is_described_by_task_and_source_class(folder):
    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensors({'targets': 'x'})

    generated = task('generated', seqio.FunctionDataSource(read, ['train', 'validation']))
    mixture = seqio.Mixture('mixture', [(generated, 1), (lines_task(folder), 1)])
    both = fingerprints.fingerprint_data(mixture, 'train')
    assert both['generated'] == {'source': 'FunctionDataSource', 'files': None}
    assert fingerprints.fingerprint_data(mixture, 'validation').keys() == {'generated'}
    alone = fingerprint(folder)
    assert fingerprints.describe_data_difference(both, alone) == 'task generated was removed'
    assert fingerprints.describe_data_difference(alone, both) == 'task generated was added'
    other = {'lines': {'source': 'FunctionDataSource', 'files': None}}
    assert 'now: None files read by FunctionDataSource' in fingerprints.describe_data_difference(alone, other)


def test_many_files_are_identified_by_their_sizes(tmp_path, monkeypatch):
    (tmp_path / 'a').mkdir()
    for number in range(300):
        (tmp_path / 'a' / f'{number:03d}.txt').write_bytes(b'x' * (number % 7))
    lines = lines_task(tmp_path)
    with monkeypatch.context() as patch:
        patch.delattr(fingerprints.untrusted_files, 'open_file')
        before = fingerprints.fingerprint_data(lines, 'train')
    assert len(json.dumps(before)) < 200
    (tmp_path / 'a' / '200.txt').write_bytes(b'x' * 100)
    assert 'now: 300 files' in fingerprints.describe_data_difference(before, fingerprint(tmp_path))


def test_a_missing_file_is_reported(folder):
    class Listed(seqio.FileDataSource):
        def list_shards(self, split):
            return [str(folder / 'a' / '0.txt'), str(folder / 'a' / 'gone.txt')]

    with pytest.raises(UserError, match=r'gone.txt .*No such file or directory'):
        fingerprints.fingerprint_data(task('listed', Listed(tf.data.TextLineDataset, {'train': ''})), 'train')


def test_a_cached_task_is_fingerprinted_by_its_cache(folder, tmp_path):
    lines = lines_task(folder)
    cache = tmp_path / 'cached'
    cache.mkdir()
    (cache / 'COMPLETED').touch()
    lines._cache_dir = str(cache)
    for number in range(2):
        np.array([number]).tofile(f'{seqio.get_cached_tfrecord_prefix(str(cache), "train")}-{number:05d}-of-00002')
    record = fingerprints.fingerprint_data(lines, 'train', use_cached=True)['lines']
    assert record['source'] == 'cache' and record['files'] == 2 and record != fingerprint(folder)['lines']


def test_the_folder_of_a_damaged_parsed_corpus_is_reported(tmp_path, monkeypatch):
    """A truncated file is detected before the first step, changed content when it is read."""
    from remixer_tasks import local_files
    from remixer_tasks.corpora import text_corpus

    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'a.txt').write_text('\n\n'.join(f'document {number}' for number in range(200)))

    def read_corpus():
        task = texts_task('corpus', local_files.corpus(str(tmp_path / 'a.txt')).create_source())
        batches = task_batches.TrainBatches(pipeline.DatasetConfig(task, LENGTHS, 10, shuffle=False), threads=1)
        for _ in range(30):
            next(batches)

    read_corpus()
    (folder,) = (tmp_path / 'cache' / 'corpora').iterdir()
    shard = folder / 'documents-00000.arrow'
    intact = shard.read_bytes()
    for damaged in (intact.replace(b'document 77', b'dokument 77'), intact[:-20]):
        # Open datasets keep the old file.
        shard.unlink()
        shard.write_bytes(damaged)
        text_corpus._open_documents.cache_clear()
        with pytest.raises(UserError, match=f'{shard} (is damaged|was truncated).*delete the folder {folder}'):
            read_corpus()
