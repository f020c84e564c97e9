"""Hugging Face datasets that are streamed during training (HF_STREAMING), without a copy.

The references are the same dataset copied into the cache, and the lists from which the files were written.
"""

import itertools
import json
import shutil
import sys

import numpy as np
import pytest
import seqio

from remixer_t5x.data import fingerprint
from remixer_t5x.data.fingerprint import describe_data_difference
from remixer_t5x.data.pipeline import DatasetConfig
from remixer_t5x.data.task_batches import EvalBatches, TrainBatches
from remixer_t5x.errors import UserError
from remixer_tasks import caching, huggingface_datasets, pretraining, vocabularies
from remixer_tasks.corpora.streamed_text import START_POSITION, ShardReader
from tests.support import feed_forward
from tests.support.command_without_autograph import main
from tests.support.compare_runs import difference as difference_of_runs
from tests.support.compare_runs import last_step
from tests.support.error_lines import error_message
from tests.support.fake_hub import FakeHub
from tests.support.real_processes import Process

datasets = pytest.importorskip('datasets', reason='datasets is not installed: pip install datasets')
from remixer_tasks.huggingface_datasets import HubDataset  # noqa: E402 (after the skip)

BYTES = seqio.ByteVocabulary(extra_ids=100)
LENGTHS = {'inputs': 32, 'targets': 16}
SHARDS, ROWS_PER_SHARD = 5, 12
TEXTS = [
    [f'document {row} of shard {shard}, {"abcdefgh" * (row % 4)}' for row in range(ROWS_PER_SHARD)]
    for shard in range(SHARDS)
]
ALL = sorted(itertools.chain(*TEXTS))
KINDS = ('jsonl', 'parquet', 'saved')


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    """Writes the same rows as JSON lines, as Parquet files with several row groups, and with `save_to_disk`."""
    folder = tmp_path_factory.mktemp('streamed')
    for kind in KINDS[:2]:
        (folder / kind).mkdir()
    for shard, texts in enumerate(TEXTS):
        name = f'train-{shard:05d}-of-{SHARDS:05d}'
        rows = [{'number': row, 'text': text} for row, text in enumerate(texts)]
        (folder / 'jsonl' / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
        datasets.Dataset.from_list(rows).to_parquet(folder / 'parquet' / f'{name}.parquet', batch_size=5)
    datasets.Dataset.from_dict({'text': list(itertools.chain(*TEXTS))}).save_to_disk(folder / 'saved')
    return folder


def streamed(path, **settings):
    return huggingface_datasets.corpus(HubDataset(str(path), **settings), streaming=True)


def documents(corpus, split):
    dataset = corpus.create_source().get_dataset(split, shuffle=False)
    return [example['text'].decode() for example in dataset.as_numpy_iterator()]


def read(reader, count, position=START_POSITION):
    """Returns the documents after a position, each with the position after it."""
    results = []
    for _ in range(count):
        position, document, is_end = reader.read_document_after(position)
        if is_end:
            break
        results.append((document.decode(), position))
    return results


@pytest.mark.parametrize('kind', KINDS)
def test_streamed_and_copied_have_the_same_documents(folders, kind):
    """Two hosts read disjoint documents."""
    copied = huggingface_datasets.corpus(HubDataset(str(folders / kind), validation_fraction=0.2))
    stream = streamed(folders / kind, validation_fraction=0.2)
    held_out = documents(stream, 'validation')
    hosts = [
        stream.create_source().get_dataset('train', False, shard_info=seqio.ShardInfo(host, 2)) for host in range(2)
    ]
    train = [[row['text'].decode() for row in host.as_numpy_iterator()] for host in hosts]
    assert sorted(held_out) == sorted(documents(copied, 'validation')) != []
    assert sorted(train[0] + train[1]) == sorted(documents(copied, 'train')) and all(train)
    assert sorted([*train[0], *train[1], *held_out]) == ALL


@pytest.mark.parametrize('kind', KINDS)
def test_reading_continues_exactly_at_every_position(folders, kind):
    """This includes positions within a shard, at its end, and at the end of an epoch."""
    corpus = streamed(folders / kind, validation_fraction=0.1)
    epoch = len(documents(corpus, 'train'))
    shards = range(corpus.open_shards('train').num_shards)
    unbroken = read(ShardReader(corpus, shards, 'seed'), 2 * epoch + 3)
    texts = [text for text, _ in unbroken]
    assert sorted(texts[:epoch]) == sorted(texts[epoch : 2 * epoch]) and texts[:epoch] != texts[epoch : 2 * epoch]
    for number, (_, position) in enumerate(unbroken[:-3], 1):
        continued = [text for text, _ in read(ShardReader(corpus, shards, 'seed'), 3, position)]
        assert continued == texts[number : number + 3] and len(position) < 500


def test_a_resumed_run_has_the_batches_of_an_uninterrupted_run(folders):
    """30 batches are more than an epoch. UL2 has a position for each denoiser."""

    def batches():
        corpus = streamed(folders / 'parquet', validation_fraction=0.1)
        denoisers = [('r', 3, 0.15, 1), ('s', None, 0.25, 1)]
        task = pretraining.ul2(corpus, BYTES, shuffle_buffer_size=8, denoisers=denoisers)
        return TrainBatches(DatasetConfig(task, LENGTHS, 4))

    unbroken, resumed = batches(), batches()
    for _ in range(30):
        next(unbroken)
    resumed.restore_states(unbroken.capture_states())
    for _ in range(10):
        expected, batch = next(unbroken), next(resumed)
        assert expected.keys() == batch.keys()
        assert all(np.array_equal(expected[name], batch[name]) for name in expected)


def test_held_out_documents_are_complete_after_an_error(folders, monkeypatch):
    corpus = streamed(folders / 'jsonl', validation_fraction=0.2)
    read, errors = type(corpus.open_shards('validation')).read_documents, [UserError('the network is down')]

    def fail_once(shards, shard, state):
        for number, row in enumerate(read(shards, shard, state)):
            if (shard, number) == (2, 4) and errors:
                raise errors.pop()
            yield row

    monkeypatch.setattr(type(corpus.open_shards('validation')), 'read_documents', fail_once)
    expected, seen = documents(streamed(folders / 'saved', validation_fraction=0.2), 'validation'), []
    with pytest.raises(UserError, match='the network is down'):
        seen.extend(corpus.get_held_out_documents())
    assert 0 < len(seen) < len(expected) and documents(corpus, 'validation') == expected


def test_an_evaluation_reads_no_further_than_its_batches(tmp_path, monkeypatch):
    """The rest of the split may be large. Documents are joined in groups of 32, and some are read ahead."""
    for shard in range(4):
        rows = [{'text': f'{shard} {row}'} for row in range(2000)]
        (tmp_path / f'train-{shard}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    shards, opened = huggingface_datasets.DatasetShards, set()
    read = shards.read_documents

    def record_shard(self, shard, state):
        # Threads of earlier tests may still read ahead.
        if str(tmp_path) in self.parser.where:
            opened.add(shard)
        return read(self, shard, state)

    monkeypatch.setattr(shards, 'read_documents', record_shard)
    task = pretraining.span_corruption(streamed(tmp_path, validation_fraction=0.5), BYTES)
    assert len(list(EvalBatches(DatasetConfig(task, LENGTHS, 2, split='validation', shuffle=False), limit=1))) == 1
    assert opened == {0}


def test_a_validation_split_is_used_and_unknown_splits_are_rejected(folders, tmp_path):
    rows = datasets.Dataset.from_dict({'text': ALL})
    datasets.DatasetDict(train=rows, dev=rows.select(range(7))).save_to_disk(tmp_path / 'both')
    corpus = streamed(tmp_path / 'both', validation_split='dev')
    assert documents(corpus, 'validation') == ALL[:7] and documents(corpus, 'train') == ALL
    unknown = streamed(tmp_path / 'both', train_split='test')
    assert "must be one of dev, train, got 'test'" in error_message(documents, unknown, 'train')


def test_malformed_rows_are_skipped_with_one_warning_or_rejected(tmp_path, capsys):
    rows = [{'text': 'one'}, {'text': None}, {'text': ' '}, {'text': None}, {'text': 'two'}]
    (tmp_path / 'train.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    assert documents(streamed(tmp_path), 'train') == ['one', 'two']
    (line,) = capsys.readouterr().err.splitlines()
    assert 'split train, shard 0:2 (column text must contain text, got NoneType)' in line and 'STRICT = True' in line
    with pytest.raises(Exception, match='shard 0:2: column text must contain text, got NoneType; correct the line'):
        documents(streamed(tmp_path, strict=True), 'train')


def test_a_column_of_timestamps_is_not_text(tmp_path):
    """The JSON reader of `datasets` converts texts such as ISO dates to timestamps."""
    (tmp_path / 'train.jsonl').write_text('{"text": "2020-01-01"}\n')
    with pytest.raises(Exception, match='column text must contain text, got datetime'):
        documents(streamed(tmp_path, strict=True), 'train')


def test_a_fingerprint_changes_with_the_data(folders, tmp_path):
    """The fingerprint depends on the content, and on whether the dataset is streamed or copied."""

    def identity(path, streaming=True):
        corpus = huggingface_datasets.corpus(HubDataset(str(path)), streaming=streaming)
        return fingerprint.fingerprint_data(pretraining.span_corruption(corpus, BYTES), 'train')

    shutil.copytree(folders / 'jsonl', tmp_path / 'moved')
    before = identity(folders / 'jsonl')
    assert describe_data_difference(before, identity(tmp_path / 'moved')) is None
    changed = sorted((tmp_path / 'moved').iterdir())[2]
    changed.write_text(changed.read_text().replace('document 3', 'dokument 3'))
    difference = describe_data_difference(before, identity(tmp_path / 'moved'))
    assert f'different files, beginning with {changed.name}' in difference
    difference = describe_data_difference(before, identity(folders / 'jsonl', False))
    assert 'read by StreamedSource; now: ' in difference and 'read by TextSource' in difference


def test_a_data_set_on_the_hub_is_streamed_with_its_commit(folders, tmp_path, monkeypatch):
    """Uses the real datasets and huggingface_hub with a fake Hub server."""
    hub = FakeHub()
    try:
        hub.use_for_datasets(monkeypatch, tmp_path)
        hub.add('some/body', folders / 'jsonl')
        corpus = streamed('some/body', validation_fraction=1e-9)
        assert sorted(documents(corpus, 'train')) == ALL
        expected = [text for text, _ in read(ShardReader(corpus, range(SHARDS), 'seed'), 20)]
        position = read(ShardReader(corpus, range(SHARDS), 'seed'), 8)[-1][1]
        assert [text for text, _ in read(ShardReader(corpus, range(SHARDS), 'seed'), 12, position)] == expected[8:]
        stored = [path for path in tmp_path.rglob('*') if path.is_file() and path.stat().st_size > 1000]
        assert stored == []
        copied = huggingface_datasets.corpus(HubDataset('some/body'))
        assert sorted(documents(copied, 'train') + documents(copied, 'validation')) == ALL

        def identity():
            return fingerprint.fingerprint_data(pretraining.span_corruption(streamed('some/body'), BYTES), 'train')

        before = identity()
        assert describe_data_difference(before, identity()) is None
        files = hub.models['some/body']['main']
        files['train-00001-of-00005.jsonl'] = files['train-00000-of-00005.jsonl']
        difference = describe_data_difference(before, identity())
        assert 'different files, beginning with train-00000-of-00005.jsonl' in difference
        assert 'use an existing folder or Hub name' in error_message(documents, streamed('some/mind'), 'train')
    finally:
        hub.close()


def test_wrong_settings_are_rejected(folders, tmp_path, monkeypatch):
    path = folders / 'jsonl'
    trained = vocabularies.trained(streamed(path), 300)
    assert "is streamed (HF_STREAMING=True); pass --gin.VOCABULARY='@voc" in error_message(lambda: trained.vocab_size)

    def read_share(corpus, shares=1):
        next(iter(corpus.create_source().get_dataset('train', shard_info=seqio.ShardInfo(0, shares))))

    assert 'STREAMS must be at most 5' in error_message(read_share, streamed(path), 8)
    reader = ShardReader(streamed(path, validation_fraction=1 - 1e-9), range(5), 'seed')
    assert 'no documents to train on in 5 of its 5' in error_message(reader.read_document_after, START_POSITION)
    # Raised before a pipeline runs, because TensorFlow changes the messages of errors within it.
    other_field = huggingface_datasets.corpus(HubDataset(str(path)), 'body', True)
    assert 'TEXT_FIELD must use columns of' in error_message(other_field.open_shards, 'train')
    task = pretraining.span_corruption(streamed(path, validation_fraction=1e-9), BYTES)
    assert 'cannot be cached' in error_message(caching.cache_task, task, str(tmp_path / 'cached'), 'note')
    config = DatasetConfig(task, LENGTHS, 2, split='validation', shuffle=False)
    assert 'no validation documents; set a larger VALIDATION_FRACTION' in error_message(lambda: [*EvalBatches(config)])
    monkeypatch.setitem(sys.modules, 'datasets', None)
    assert "pip install 'remixer-t5x[hf-datasets]'" in error_message(read_share, streamed(path))


def test_a_damaged_shard_is_reported(folders, tmp_path):
    """Reading raises an error of one line within the epoch, also if it is repeated."""
    for path in sorted((folders / 'jsonl').iterdir())[:2]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / 'train-00002-of-00005.jsonl').write_text('{"number": 1, "text": "one"}\n{"number": 2, "te')
    corpus = streamed(tmp_path)
    reader = ShardReader(corpus, range(3), None)
    position = read(reader, 2 * ROWS_PER_SHARD)[-1][1]
    for _ in range(2):
        message = error_message(reader.read_document_after, position)
        assert 'split train, shard 2 cannot be read after row 0' in message


def train_arguments(folder, data):
    """Returns the arguments of a train command of 24 steps, with a model of one layer without attention."""
    files = ('models/t5_1_1.gin', 'sizes/tiny.gin', 'data/huggingface.gin', 'optimizers/adafactor_constant.gin')
    sizes = {'EMBED_DIM': 16, 'MLP_DIM': 32, 'NUM_ENCODER_LAYERS': 1}
    data = {'HF_DATASET': f'{data}', 'HF_STREAMING': True, 'VALIDATION_FRACTION': 0.1, 'TASK_FEATURE_LENGTHS': LENGTHS}
    run = {'BATCH_SIZE': 4, 'TRAIN_STEPS': 24, 'LOG_PERIOD': 2, 'EVAL_PERIOD': 8, 'EVAL_STEPS': 2, 'DROPOUT_RATE': 0.1}
    vocabulary_flags = ('--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384', '--gin.CHECKPOINT_PERIOD=5')
    macros = {**sizes, 'NUM_DECODER_LAYERS': 1, **data, **run, 'MODEL_DIR': f'{folder}'}
    names = (f'--gin_file={name}' for name in (*files, 'hardware/cpu.gin', 'runs/pretrain.gin'))
    flags = (f'--gin.{name}={value!r}' for name, value in macros.items())
    return ['train', *names, *flags, *vocabulary_flags, *feed_forward.FLAGS]


def test_a_killed_and_resumed_train_command_is_bit_identical(folders, tmp_path):
    """24 batches of 4 are about three epochs."""

    def start(name, output):
        return Process(main, train_arguments(tmp_path / name, folders / 'parquet'), output=tmp_path / output)

    unbroken = start('unbroken', 'unbroken.log')
    assert unbroken.wait() == 0, unbroken.output()
    killed = start('killed', 'killed.log')
    killed.wait_until(lambda: last_step(tmp_path / 'killed') >= 12, 'step 12')
    killed.kill()
    resumed = start('killed', 'resumed.log')
    assert resumed.wait() == 0, resumed.output()
    print(killed.output(), resumed.output(), sep='\n')
    assert 'resuming at step' in resumed.output() or 'is already at step 24' in resumed.output()
    assert difference_of_runs(tmp_path / 'killed', tmp_path / 'unbroken', 24) is None
