"""Files that are damaged or go away while they are read: the run ends with one line that names the file."""

import pathlib

import pytest
import seqio
import tensorflow as tf

from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.errors import UserError

LENGTHS = {'inputs': 8, 'targets': 8}
SHARDS = 3


def copied(row):
    text = row['text'] if isinstance(row, dict) else row
    return {'inputs': text, 'targets': text}


def task(name, source):
    return seqio.Task(
        name,
        source=source,
        output_features={key: seqio.Feature(seqio.ByteVocabulary()) for key in LENGTHS},
        preprocessors=[
            lambda dataset: dataset.map(copied),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        shuffle_buffer_size=4,
    )


@pytest.fixture
def records(tmp_path):
    for shard in range(SHARDS):
        with tf.io.TFRecordWriter(str(tmp_path / f'data-{shard:05d}-of-{SHARDS:05d}')) as writer:
            for number in range(50):
                writer.write(f'{shard} {number:05d}'.encode())
    return tmp_path


def of_records(folder, name, read=tf.data.TFRecordDataset):
    files = {'train': str(folder / 'data-*'), 'validation': str(folder / 'data-*')}
    return task(name, seqio.FileDataSource(read, files))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def told(call):
    with pytest.raises(UserError) as error:
        call()
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def read_all(config):
    batches = task_batches.TrainBatches(config, threads=1)
    for _ in range(2 * SHARDS * 50 // config.batch_size):
        next(batches)


@pytest.mark.parametrize('damage', [flip, cut])
def test_a_damaged_record_names_its_file(records, damage, capsys):
    """In the middle of an epoch, and in an evaluation."""
    damage(records / 'data-00001-of-00003')
    config = pipeline.DatasetConfig(of_records(records, f'damaged_{damage.__name__}'), LENGTHS, 10, shuffle=False)
    for call in (lambda: read_all(config), lambda: list(task_batches.EvalBatches(config))):
        said = told(call)
        assert f'the damaged file is {records}/data-00001-of-00003 (' in said
        assert said.endswith('): put a sound copy in its place')
    assert 'looking for the damaged one of 3 files' in capsys.readouterr().err


def test_a_file_that_goes_away_in_the_middle_is_named(records):
    """The third of three files is removed as the second one's first record is read; files are read one by one."""
    third = records / 'data-00002-of-00003'

    def remove_third(text):
        if text.numpy() == b'1 00000':
            third.unlink()
        return text

    def removing(path):
        dataset = tf.data.TFRecordDataset(path)
        return dataset.map(lambda text: tf.ensure_shape(tf.py_function(remove_third, [text], tf.string), ()))

    task = of_records(records, 'gone', removing)
    config = pipeline.DatasetConfig(task, LENGTHS, 10, shuffle=False, save_position=False)
    said = told(lambda: read_all(config))
    assert third.name in said and 'No such file' in said


def test_our_own_cache_is_told_to_be_deleted(tmp_path, monkeypatch):
    """A file that is cut off is noticed before the first step, one of the same size when it is read."""
    from remixer_tasks import local_files
    from remixer_tasks.corpora import text_corpus

    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    (tmp_path / 'a.txt').write_text('\n\n'.join(f'document {number}' for number in range(200)))

    def config(name):
        made = task(name, local_files.corpus(str(tmp_path / 'a.txt')).source())
        return pipeline.DatasetConfig(made, LENGTHS, 10, shuffle=False)

    read_all(config('whole'))
    (folder,) = (tmp_path / 'cache' / 'corpora').iterdir()
    shard = pathlib.Path(folder, 'documents-00000.arrow')
    sound = shard.read_bytes()
    repair = f'delete the folder {folder}, and it is made again'

    def replace(content):
        # Datasets that are open keep the old file.
        shard.unlink()
        shard.write_bytes(content)
        text_corpus._open.cache_clear()

    replace(sound.replace(b'document 77', b'dokument 77'))
    assert told(lambda: read_all(config('flipped'))).endswith(f'{shard} is damaged; {repair}')
    replace(bytes(100) + sound[100:-100] + bytes(100))
    message = told(lambda: read_all(config('head')))
    assert f'{shard} is damaged (' in message and message.endswith(repair)
    replace(sound[:-20])
    assert told(lambda: read_all(config('cut'))) == f'{shard} was cut off or changed; {repair}'
    shard.unlink()
    assert told(lambda: read_all(config('missing'))) == f'{shard} is gone; {repair}'
    shard.write_bytes(sound)
    read_all(config('sound'))
