"""`remixer-t5x data cache`, and training from its output.

Tests of reading write a cache in seqio's layout. Tests of writing require Apache Beam, which is incompatible with some
versions of the other packages, and are skipped without it.
"""

import collections
import importlib.util
import json
import pathlib
import re

import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.cli import main
from remixer_t5x.data import pipeline, task_batches, task_vocabulary
from remixer_tasks import caching, pretraining
from remixer_tasks.corpora import text_corpus
from tests.support.error_lines import error_message

DOCUMENTS = {
    'train': [f'document {i} has {i * i} letters and {"some more words " * (i % 5)}' for i in range(24)],
    'validation': [f'held out {i} of them' for i in range(5)],
}
WITH_BEAM = pytest.mark.skipif(
    importlib.util.find_spec('apache_beam') is None,
    reason="Apache Beam is not installed: pip install 'remixer-t5x[beam]'",
)


@pytest.fixture(autouse=True)
def reset_cache_folders():
    seqio.set_global_cache_dirs([])


def documents_task(extra_ids=100):
    """Returns a task with documents as targets and their second words as inputs."""

    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices(DOCUMENTS[split]).map(lambda text: {'targets': text})

    def add_second_word(example):
        return {**example, 'inputs': tf.strings.split(example['targets'])[1]}

    feature = seqio.Feature(seqio.ByteVocabulary(extra_ids))
    return seqio.Task(
        'cached_documents',
        source=seqio.FunctionDataSource(read, list(DOCUMENTS)),
        preprocessors=[
            seqio.map_over_dataset(add_second_word),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={'inputs': feature, 'targets': feature},
    )


def make_record(vocabulary=None):
    return task_vocabulary.get_vocabulary_record(vocabulary or seqio.ByteVocabulary(100))


def write_cache(folder, name, shards=3):
    """Writes a cache of DOCUMENTS as bytes, in the layout of seqio's cache job."""
    path = pathlib.Path(folder, name)
    path.mkdir(parents=True)
    for split, texts in DOCUMENTS.items():
        rows = [{'targets': byte_ids(text), 'inputs': byte_ids(text.split()[1])} for text in texts]
        for shard in range(shards):
            with tf.io.TFRecordWriter(str(path / f'{split}.tfrecord-{shard:05d}-of-{shards:05d}')) as writer:
                for row in rows[::-1][shard::shards]:
                    writer.write(seqio.dict_to_tfexample(row).SerializeToString())
        features = {key: {'dtype': 'int32', 'shape': [None]} for key in rows[0]}
        info = {'features': features, 'num_shards': shards, 'seqio_version': seqio.__version__}
        stats = {'examples': len(rows), 'targets_tokens': sum(len(row['targets']) for row in rows)}
        (path / f'info.{split}.json').write_text(json.dumps(info))
        (path / f'stats.{split}.json').write_text(json.dumps(stats))
    (path / 'COMPLETED').write_text(pipeline.format_cache_record(make_record()) + '\n')
    return str(folder)


def byte_ids(text):
    """Returns the ids of ByT5: bytes after three special ids."""
    return np.array([byte + 3 for byte in text.encode()], np.int32)


def count_rows(task, split='train', **cached):
    """Counts the occurrences of each row in one epoch."""
    config = pipeline.DatasetConfig(task, {'inputs': 64, 'targets': 192}, 4, split, shuffle=False, **cached)
    counts = collections.Counter()
    for batch in task_batches.EvalBatches(config):
        weighted = batch['decoder_loss_weights'].any(1)
        for inputs, targets in zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True):
            counts[inputs.tobytes() + targets.tobytes()] += 1
        counts.subtract({(0 * inputs).tobytes() + (0 * targets).tobytes(): int((~weighted).sum())})
    return +counts


def test_batches_from_the_cache_are_those_without_it_up_to_order(tmp_path):
    folder = write_cache(tmp_path, 'cached_documents')
    uncached = count_rows(documents_task())
    assert sum(uncached.values()) == len(DOCUMENTS['train'])
    assert count_rows(documents_task(), use_cached=True, cache_dir=folder) == uncached


def _fail(malformed):
    raise AssertionError('the text was read instead of the cache')


def test_order_is_deterministic_and_positions_resume_exactly(tmp_path):
    folder = write_cache(tmp_path, 'cached_span_corruption')
    corpus = text_corpus.ParsedCorpus('some text', 'some text', _fail)
    task = pretraining.span_corruption(corpus, seqio.ByteVocabulary(100), 'cached', shuffle_buffer_size=16)
    lengths = {'inputs': 24, 'targets': 10}
    config = pipeline.DatasetConfig(task, lengths, 4, seed=3, use_cached=True, cache_dir=folder)
    first, second, resumed = (task_batches.TrainBatches(config) for _ in range(3))
    batches = [next(first) for _ in range(30)]
    for _ in range(13):
        next(second)
    resumed.restore_states(second.capture_states())
    for expected, other, again in zip(batches[13:], second, resumed, strict=False):
        for name, value in expected.items():
            np.testing.assert_array_equal(other[name], value)
            np.testing.assert_array_equal(again[name], value)


def test_denoisers_read_their_caches_in_different_orders(tmp_path):
    corpus = text_corpus.ParsedCorpus('some text', 'some text', _fail)
    rows = [('r', span, 0.005, 1.0) for span in (1, 2)]
    mixture = pretraining.ul2(corpus, seqio.ByteVocabulary(100), 'cached', denoisers=rows)
    orders = []
    for task in mixture.tasks:
        seqio.set_global_cache_dirs([write_cache(tmp_path, task.name, shards=24)])
        # The only example contains all documents, and few of its tokens are masked.
        examples = task.get_dataset({'inputs': 3000, 'targets': 90}, use_cached=True, seed=3)
        (text,) = [bytes(id - 3 for id in row['inputs'] if 3 <= id < 259) for row in examples.as_numpy_iterator()]
        orders.append(re.findall(rb'document (\d+)', text))
    first, second = orders
    shared = [number for number in first if number in second]
    assert len(shared) > 16 and shared != [number for number in second if number in first]


def cache_error(task, folder):
    return error_message(lambda: count_rows(task, use_cached=True, cache_dir=folder and str(folder)))


def test_missing_incomplete_and_mismatched_caches_are_rejected(tmp_path):
    assert 'a complete cache of cached_documents' in cache_error(documents_task(), tmp_path / 'nowhere')
    assert 'of cached_documents, got None' in cache_error(documents_task(), None)
    folder = write_cache(tmp_path / 'complete', 'cached_documents')
    assert 'of 259 ids' in cache_error(documents_task(extra_ids=0), folder)
    # Caches of seqio's own script do not record the vocabulary.
    completed = pathlib.Path(folder, 'cached_documents', 'COMPLETED')
    completed.write_text('')
    pipeline.require_cache(documents_task(extra_ids=0), folder, make_record(seqio.ByteVocabulary(0)))
    completed.unlink()
    assert '`remixer-t5x data cache`' in cache_error(documents_task(), folder)


@pytest.fixture
def run_data_cache(tmp_path, monkeypatch, clean_environment, capfd):
    """Runs `data cache` on DOCUMENTS as text files; returns the exit code, standard output and standard error."""
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'parsed'))
    for split, texts in DOCUMENTS.items():
        (tmp_path / f'{split}.txt').write_text('\n\n'.join(texts))

    files = [f'--gin.FILES={tmp_path}/train.txt', f'--gin.VALIDATION_FILES={tmp_path}/validation.txt']
    command = ['data', 'cache', '--gin_file=data/own_text.gin', *files, f'--output_dir={tmp_path}/cache']
    command += ['--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384']

    def run(*flags):
        capfd.readouterr()
        return main.main([*command, *flags]), *capfd.readouterr()

    return run


def test_an_existing_cache_is_kept_and_its_vocabulary_compared(run_data_cache, tmp_path):
    folder = pathlib.Path(write_cache(tmp_path / 'cache', 'own_text_span_corruption'), 'own_text_span_corruption')
    code, out, _ = run_data_cache()
    assert code == 0
    assert out.startswith(
        f'own_text_span_corruption is already cached in {folder}; if the text has changed, delete this folder'
    )
    (folder / 'COMPLETED').write_text(pipeline.format_cache_record(make_record(seqio.ByteVocabulary(0))))
    code, out, error = run_data_cache()
    assert code == 2 and not out
    assert error.startswith('error: ') and 'use another CACHE_DIR' in error


@WITH_BEAM
@pytest.mark.filterwarnings('ignore')
def test_data_cache_writes_what_training_reads(run_data_cache, tmp_path):
    leftover = tmp_path / 'cache' / 'own_text_span_corruption' / 'train.tfrecord-00000-of-00002'
    leftover.parent.mkdir(parents=True)
    leftover.write_text('leftover of a killed job')
    code, out, error = run_data_cache('--shards=5')
    assert code == 0, error
    assert not leftover.exists()
    lines = out.splitlines()
    assert len(list((tmp_path / 'cache/own_text_span_corruption').glob('train.tfrecord-*-of-00005'))) == 5
    assert lines[-1] == f'to train with the cache: --gin.USE_CACHED_TASKS=True --gin.CACHE_DIR={tmp_path}/cache'
    from remixer_tasks import local_files, pretraining, vocabularies

    corpus = local_files.corpus(f'{tmp_path}/train.txt', f'{tmp_path}/validation.txt')
    task = pretraining.span_corruption(corpus, vocabularies.byte(), 'own_text')
    pipeline.require_cache(task, f'{tmp_path}/cache', make_record(vocabularies.byte()))
    assert caching.read_completion_note(task.cache_dir) == pipeline.format_cache_record(
        make_record(vocabularies.byte())
    )
    for split in DOCUMENTS:
        uncached = task.preprocess_precache(task.source.get_dataset(split, shuffle=False))
        cached = task._get_cached_source(split).get_dataset(split, shuffle=False)
        documents = [
            sorted(row['targets'].tobytes() for row in each.as_numpy_iterator()) for each in (uncached, cached)
        ]
        assert documents[0] == documents[1] and len(documents[0]) == len(DOCUMENTS[split])
    assert 'is already cached in' in run_data_cache()[1]


@WITH_BEAM
@pytest.mark.filterwarnings('ignore')
def test_a_failed_pipeline_leaves_no_cache_and_reports_the_reason(tmp_path):
    task = documents_task()

    def refuse(example):
        with tf.control_dependencies([tf.debugging.Assert(False, ['UserError: line 7 is no text'])]):
            return {key: tf.identity(value) for key, value in example.items()}

    broken = seqio.Task(
        task.name,
        source=task.source,
        preprocessors=[seqio.map_over_dataset(refuse), *task.preprocessors],
        output_features=task.output_features,
    )
    assert 'line 7 is no text' in error_message(caching.cache_task, broken, str(tmp_path), 'note')
    assert caching.read_completion_note(caching.get_cache_folder(task, str(tmp_path))) is None
