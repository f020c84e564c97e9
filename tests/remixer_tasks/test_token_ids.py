"""Token ids that are kept: the same batches as without them, resumed exactly whatever became of the files."""

import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from remixer_t5x.data import pipeline, task_batches
from remixer_tasks import local_files, pretraining, vocabularies
from remixer_tasks.corpora import token_ids

DOCUMENTS = [f'the word {number * 7919 % 10007} is next to {number * 104729 % 9973}' for number in range(1300)]
LENGTHS = {'inputs': 48, 'targets': 20}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a task on DOCUMENTS; each is a new process's, as far as the files are concerned."""
    (tmp_path / 'a.txt').write_text('\n\n'.join(DOCUMENTS))

    def make(gigabytes=1.0):
        monkeypatch.setattr(token_ids, '_begun', set())
        corpus = local_files.corpus(str(tmp_path / 'a.txt'), token_cache_gb=gigabytes)
        return pretraining.span_corruption(corpus, vocabularies.trained(corpus, 300), shuffle_buffer_size=20)

    yield make
    token_ids.finish()


def batches(task, streams=None):
    return task_batches.TrainBatches(pipeline.DatasetConfig(task, LENGTHS, 32, streams=streams), threads=1)


def take(source, count):
    return [next(source) for _ in range(count)]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], strict=True)


def text_alone(task):
    task.source.read_text_alone()
    return batches(task)


def kept(cache_folder):
    return sorted(cache_folder.glob('ids/*/*-of-*'))


def test_batches_with_kept_ids_are_those_without(make, cache_folder):
    expected = take(text_alone(make()), 12)
    assert not kept(cache_folder)
    assert_same(take(batches(make()), 12), expected)
    token_ids.finish()
    files = kept(cache_folder)
    assert len(files) == 64
    # That these files are what is read: without a document, the batches differ.
    again = batches(make())
    assert_same(take(again, 12), expected)
    for file in files:
        with tf.io.TFRecordWriter(str(file)) as writer:
            writer.write(np.asarray([5, 6, 7], '<u2').tobytes())
    assert not np.array_equal(next(batches(make()))['decoder_target_tokens'], expected[0]['decoder_target_tokens'])


def test_positions_are_exact_whatever_became_of_the_files(make, cache_folder):
    """Saved while text is read and while ids are; restored with and without the ids; 30 batches are two epochs."""
    expected = take(text_alone(make()), 30)
    first = batches(make(0))
    take(first, 5)
    from_text = first.capture()
    make().source.get_dataset('train')
    token_ids.finish()
    assert len(kept(cache_folder)) == 64
    second = batches(make())
    second.restore(from_text)
    assert_same(take(second, 17), expected[5:22])
    from_ids = second.capture()
    shutil.rmtree(cache_folder / 'ids')
    third = batches(make(0))
    third.restore(from_ids)
    assert 0 < len(kept(cache_folder)) < 64, 'the files that the position names are made again, and no more'
    assert_same(take(third, 8), expected[22:])


def test_a_run_from_before_there_were_ids_goes_on(make):
    """Its position is of a pipeline without them."""
    old = text_alone(make())
    take(old, 7)
    new = batches(make())
    new.restore(old.capture())
    assert_same(take(new, 5), take(old, 5))


def test_the_folder_has_a_limit_and_ids_in_use_stay(cache_folder, monkeypatch):
    root = cache_folder / 'ids'
    for name in ('new', 'used', 'old'):
        (root / name).mkdir(parents=True)
        (root / name / 'train-00000-of-00064').write_bytes(bytes(100))
    for age, name in enumerate(['old', 'used', 'new']):
        os.utime(root / name, (age, age))
    assert token_ids._make_room(root / 'new', 50, 1000) and len(list(root.iterdir())) == 3
    with token_ids._locked(root / 'used' / token_ids._USED, token_ids.fcntl.LOCK_SH):
        os.utime(root / 'used', (1, 1))
        assert token_ids._make_room(root / 'new', 50, 280)
        assert {path.name for path in root.iterdir()} == {'new', 'used'}
        assert not token_ids._make_room(root / 'new', 50, 120)
    assert token_ids._make_room(root / 'new', 10, 120)
    assert {path.name for path in root.iterdir()} == {'new'}


def test_a_file_that_was_being_written_is_removed_by_the_next(make, cache_folder, monkeypatch):
    def cut_off(self, path):
        yield b'\1\0'
        raise token_ids._Stopped

    with monkeypatch.context() as patch:
        patch.setattr(token_ids.KeptIds, '_records', cut_off)
        make().source.get_dataset('train')
        token_ids.finish()
    assert not kept(cache_folder)
    make().source.get_dataset('train')
    token_ids.finish()
    assert len(kept(cache_folder)) == 64 and not list(cache_folder.glob('ids/*/*.tmp*'))
