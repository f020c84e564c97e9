"""`remixer-t5x data cache`, and training from what it writes.

What reads a cache is tested on one that the test itself has written, in seqio's layout; what writes one needs Apache
Beam, which does not install with every version of the other packages, and is skipped without it.
"""

import collections
import importlib.util
import json
import pathlib
import sys

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
    importlib.util.find_spec('apache_beam') is None, reason="Apache Beam is not here: pip install 'remixer-t5x[beam]'"
)


@pytest.fixture(autouse=True)
def no_folder_of_another_test():
    seqio.set_global_cache_dirs([])


def documents_task(extra_ids=100):
    """Whole documents as targets, and their first word as inputs: what comes out does not depend on the order."""

    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices(DOCUMENTS[split]).map(lambda text: {'targets': text})

    def first_word(example):
        return {**example, 'inputs': tf.strings.split(example['targets'])[1]}

    feature = seqio.Feature(seqio.ByteVocabulary(extra_ids))
    return seqio.Task(
        'cached_documents',
        source=seqio.FunctionDataSource(read, list(DOCUMENTS)),
        preprocessors=[
            seqio.map_over_dataset(first_word),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={'inputs': feature, 'targets': feature},
    )


def record(vocabulary=None):
    return task_vocabulary.vocabulary_record(vocabulary or seqio.ByteVocabulary(100))


def write(folder, name, completed=True, shards=3, vocabulary=None):
    """A cache of DOCUMENTS' bytes, as seqio's cache job leaves it: examples dealt to shards, last of all COMPLETED."""
    path = pathlib.Path(folder, name)
    path.mkdir(parents=True)
    for split, texts in DOCUMENTS.items():
        rows = [{'targets': ids(text), 'inputs': ids(text.split()[1])} for text in texts]
        for shard in range(shards):
            with tf.io.TFRecordWriter(str(path / f'{split}.tfrecord-{shard:05d}-of-{shards:05d}')) as writer:
                for row in rows[::-1][shard::shards]:
                    writer.write(seqio.dict_to_tfexample(row).SerializeToString())
        features = {key: {'dtype': 'int32', 'shape': [None]} for key in rows[0]}
        info = {'features': features, 'num_shards': shards, 'seqio_version': seqio.__version__}
        stats = {'examples': len(rows), 'targets_tokens': sum(len(row['targets']) for row in rows)}
        (path / f'info.{split}.json').write_text(json.dumps(info))
        (path / f'stats.{split}.json').write_text(json.dumps(stats))
    if completed:
        (path / 'COMPLETED').write_text(pipeline.format_cache_record(record(vocabulary)) + '\n')
    return str(folder)


def ids(text):
    """ByteT5's: the byte, after three special ids."""
    return np.array([byte + 3 for byte in text.encode()], np.int32)


def rows(task, split='train', **cached):
    """How often each row of a whole epoch comes."""
    config = pipeline.DatasetConfig(task, {'inputs': 64, 'targets': 192}, 4, split, shuffle=False, **cached)
    found = collections.Counter()
    for batch in task_batches.EvalBatches(config):
        weighted = batch['decoder_loss_weights'].any(1)
        for inputs, targets in zip(batch['encoder_input_tokens'], batch['decoder_target_tokens'], strict=True):
            found[inputs.tobytes() + targets.tobytes()] += 1
        found.subtract({(0 * inputs).tobytes() + (0 * targets).tobytes(): int((~weighted).sum())})
    return +found


@pytest.mark.parametrize('split', list(DOCUMENTS))
def test_batches_from_the_cache_are_those_without_it_up_to_order(tmp_path, split):
    folder = write(tmp_path, 'cached_documents')
    read = rows(documents_task(), split)
    assert sum(read.values()) == len(DOCUMENTS[split])
    assert rows(documents_task(), split, use_cached=True, cache_dir=folder) == read


def _refuse(malformed):
    raise AssertionError('the text was read instead of the cache')


def test_order_is_deterministic_and_positions_resume_exactly(tmp_path):
    folder = write(tmp_path, 'cached_span_corruption')
    corpus = text_corpus.ParsedCorpus('some text', 'some text', _refuse)
    task = pretraining.span_corruption(corpus, seqio.ByteVocabulary(100), 'cached', shuffle_buffer_size=16)
    lengths = {'inputs': 24, 'targets': 10}
    config = pipeline.DatasetConfig(task, lengths, 4, seed=3, use_cached=True, cache_dir=folder)
    first, second, resumed = (task_batches.TrainBatches(config) for _ in range(3))
    batches = [next(first) for _ in range(30)]
    for _ in range(13):
        next(second)
    resumed.restore(second.capture())
    for expected, other, again in zip(batches[13:], second, resumed, strict=False):
        for name, value in expected.items():
            np.testing.assert_array_equal(other[name], value)
            np.testing.assert_array_equal(again[name], value)


def refusal(task, folder):
    return error_message(lambda: rows(task, use_cached=True, cache_dir=folder and str(folder)))


def test_missing_incomplete_and_mismatched_caches_are_rejected(tmp_path):
    assert 'a complete cache of cached_documents' in refusal(documents_task(), tmp_path / 'nowhere')
    assert 'of cached_documents, got None' in refusal(documents_task(), None)
    half = write(tmp_path / 'half', 'cached_documents', completed=False)
    assert '`remixer-t5x data cache`' in refusal(documents_task(), half)
    whole = write(tmp_path / 'whole', 'cached_documents')
    assert 'of 259 ids' in refusal(documents_task(extra_ids=0), whole)
    # What seqio's own script wrote says nothing about the vocabulary.
    pathlib.Path(whole, 'cached_documents', 'COMPLETED').write_text('')
    pipeline.require_cache(documents_task(extra_ids=0), whole, record(seqio.ByteVocabulary(0)))


@pytest.fixture
def typed(tmp_path, monkeypatch, clean_environment, capfd):
    """Types `data cache` on DOCUMENTS as text files; gives exit code, standard output and standard error."""
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


def test_a_missing_beam_package_is_reported_with_its_extra(typed, monkeypatch):
    monkeypatch.setitem(sys.modules, 'apache_beam', None)
    code, _, error = typed()
    assert code == 2
    assert error.splitlines()[-1].startswith('error: data cache needs apache_beam')
    assert "pip install 'remixer-t5x[beam]'" in error


def test_an_existing_cache_is_kept_and_reported_in_one_line(typed, tmp_path):
    folder = write(tmp_path / 'cache', 'own_text_span_corruption')
    code, out, _ = typed()
    assert code == 0
    assert out.splitlines()[0] == (
        f'own_text_span_corruption is already cached in {folder}/own_text_span_corruption, 29 examples; '
        'to recreate it, delete that folder'
    )


def test_a_cache_with_another_vocabulary_is_not_used(typed, tmp_path):
    write(tmp_path / 'cache', 'own_text_span_corruption', vocabulary=seqio.ByteVocabulary(0))
    code, out, error = typed()
    assert code == 2 and not out
    assert error.startswith('error: ') and 'use another CACHE_DIR' in error


@WITH_BEAM
@pytest.mark.filterwarnings('ignore')
def test_data_cache_writes_what_training_reads(typed, tmp_path):
    left = tmp_path / 'cache' / 'own_text_span_corruption' / 'train.tfrecord-00000-of-00002'
    left.parent.mkdir(parents=True)
    left.write_text('what a killed job left')
    code, out, error = typed('--shards=5')
    assert code == 0, error
    assert not left.exists()
    lines = out.splitlines()
    letters = sum(len(text.encode()) for text in DOCUMENTS['train'])
    assert lines[1].startswith(f'  train: 24 examples, {letters:,} tokens of targets, 5 files, ')
    assert lines[-1] == f'to train with the cache: --gin.USE_CACHED_TASKS=True --gin.CACHE_DIR={tmp_path}/cache'
    from remixer_tasks import local_files, pretraining, vocabularies

    corpus = local_files.corpus(f'{tmp_path}/train.txt', f'{tmp_path}/validation.txt')
    task = pretraining.span_corruption(corpus, vocabularies.byte(), 'own_text')
    pipeline.require_cache(task, f'{tmp_path}/cache', record(vocabularies.byte()))
    assert caching.read_completed(task.cache_dir) == pipeline.format_cache_record(record(vocabularies.byte()))
    for split in DOCUMENTS:
        read = task.preprocess_precache(task.source.get_dataset(split, shuffle=False))
        cached = task._get_cached_source(split).get_dataset(split, shuffle=False)
        documents = [sorted(row['targets'].tobytes() for row in each.as_numpy_iterator()) for each in (read, cached)]
        assert documents[0] == documents[1] and len(documents[0]) == len(DOCUMENTS[split])
    assert 'already, 29 examples' in typed()[1]


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
    assert 'line 7 is no text' in error_message(caching.write, broken, str(tmp_path), 'note')
    assert caching.read_completed(caching.cache_folder(task, str(tmp_path))) is None
