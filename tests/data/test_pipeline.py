"""Batches of a task in memory: order, host shards, exact positions and errors."""

import collections
import contextlib
import dataclasses
import functools
import inspect

import numpy as np
import pytest
import seqio
import tensorflow as tf

from remixer_t5x.data import pipeline, task_batches
from remixer_t5x.data.prefetch import DataPosition, Prefetcher
from remixer_t5x.data.resumable_iterator import call_without_autograph
from tests.support.error_lines import error_message

LENGTHS = {'inputs': 16, 'targets': 12}


@pytest.fixture(scope='module')
def task(tiny):
    return tiny.task('tiny_data', train=60, validation=13)


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], strict=True)


def texts(batches, vocab):
    return [vocab.decode([int(t) for t in row]) for batch in batches for row in batch['decoder_target_tokens']]


@pytest.mark.parametrize('pack', [False, True])
def test_batches_equal_those_of_seqio(task, pack):
    """The reference is `seqio.get_dataset` with the same arguments."""
    config = pipeline.DatasetConfig(task, LENGTHS, batch_size=4, pack=pack, seed=3)
    converter = seqio.EncDecFeatureConverter(pack=pack)
    theirs = seqio.get_dataset(task, LENGTHS, converter, 'train', shuffle=True, seed=3, num_epochs=None, batch_size=4)
    ours = take(task_batches.TrainBatches(config), 5)
    assert_same(ours, list(theirs.take(5).as_numpy_iterator()))
    assert {name: a.shape for name, a in ours[0].items()} == pipeline.get_batch_shapes(config)
    assert all(a.dtype == np.int32 for a in ours[0].values())


def assert_position_is_restored(config, drawn, *share):
    source, fresh = (task_batches.TrainBatches(config, *share, threads=1) for _ in range(2))
    take(source, drawn)
    fresh.restore_states(source.capture_states())
    assert_same(take(fresh, 4), take(source, 4))


@pytest.mark.parametrize('settings', [{'pack': True}, {'length_buckets': (9, 11)}])
def test_a_restored_position_continues_with_the_next_batch(task, settings):
    """19 batches of 4 are more than an epoch of 60 examples, so the position includes shuffle buffer and epoch."""
    assert_position_is_restored(pipeline.DatasetConfig(task, LENGTHS, batch_size=4, **settings), 19)


@pytest.mark.parametrize(
    ('before', 'after', 'settings', 'streams'),
    [(2, 1, {}, 2), (1, 3, {'streams': 3}, 3), (2, 3, {'length_buckets': (9, 11)}, 1)],
)
def test_other_numbers_of_hosts_resume_with_the_same_batches(task, before, after, settings, streams):
    """The number of streams is STREAMS, 1 with length buckets, or the number of hosts at the start of the run."""
    config = pipeline.DatasetConfig(task, LENGTHS, batch_size=12, **settings)
    old = [task_batches.TrainBatches(config, share, before, threads=1) for share in range(before)]
    captures = []
    for _ in range(3):
        for batches in old:
            next(batches)
        captures.append({index: state for batches in old for index, state in batches.capture_states().items()})
    assert sorted(captures[0]) == list(range(streams))
    # Hosts capture after different numbers of batches.
    captured_at = {index: 1 + index % 3 for index in range(streams)}
    position = DataPosition(3, captured_at, {index: captures[at - 1][index] for index, at in captured_at.items()})
    with contextlib.ExitStack() as stack:
        sources = [
            task_batches.TrainBatches(config, share, after, threads=1, streams=streams) for share in range(after)
        ]
        new = [stack.enter_context(Prefetcher(source, lambda batch: batch, position)) for source in sources]
        for _ in range(2):
            joined = [
                {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
                for parts in ([next(batches) for batches in group] for group in (old, new))
            ]
            assert_same(joined[:1], joined[1:])


def input_lengths(batch):
    return np.count_nonzero(batch['encoder_input_tokens'], axis=1)


def test_length_buckets_group_and_trim_the_same_rows(task):
    """60 examples of 7 to 14 tokens in batches of 4: after k epochs, at most 3 rows per bucket are still missing."""
    config = pipeline.DatasetConfig(task, LENGTHS, batch_size=4, length_buckets=(9, 11), shuffle=False)
    padded = dataclasses.replace(config, length_buckets=())
    buckets, rows = (9, 11, 16), []
    for batch in take(task_batches.TrainBatches(config), 30):
        length = batch['encoder_input_tokens'].shape[1]
        assert length == min(bucket for bucket in buckets if bucket >= input_lengths(batch).max())
        assert all(sum(bucket < n for bucket in buckets) == buckets.index(length) for n in input_lengths(batch))
        assert batch['decoder_input_tokens'].shape == (4, LENGTHS['targets'])
        rows += texts([batch], seqio.ByteVocabulary())
    every = texts(take(task_batches.TrainBatches(padded), 32), seqio.ByteVocabulary())
    missing = collections.Counter(every) - collections.Counter(rows)
    assert len(rows) == 120 and not collections.Counter(rows) - collections.Counter(every)
    assert missing.total() <= 3 * len(buckets)


def copy_text(row):
    text = row['text'] if isinstance(row, dict) else row
    return {'inputs': text, 'targets': text}


def texts_task(name, source):
    return seqio.Task(
        name,
        source=source,
        output_features={key: seqio.Feature(seqio.ByteVocabulary(extra_ids=100)) for key in LENGTHS},
        preprocessors=[
            lambda dataset: dataset.map(copy_text),
            seqio.preprocessors.tokenize,
            seqio.preprocessors.append_eos_after_trim,
        ],
        shuffle_buffer_size=16,
    )


def lines_task(folder, name):
    for number in range(3):
        (folder / f'{number}.txt').write_text(''.join(f'file {number} line {i}\n' for i in range(40)))
    return texts_task(name, seqio.TextLineDataSource({'train': str(folder / '*.txt')}))


def test_the_position_of_a_parallel_source_is_restored(tmp_path):
    """There are fewer files than hosts."""
    config = pipeline.DatasetConfig(lines_task(tmp_path, 'parallel'), LENGTHS, batch_size=25)
    assert_position_is_restored(config, 11, 4, 5)


def test_sequential_reading_has_the_order_of_parallel_reading(tmp_path):
    """The reference is seqio's parallel interleave."""
    config = pipeline.DatasetConfig(lines_task(tmp_path, 'in_turn'), LENGTHS, batch_size=5, shuffle=False)
    converter = seqio.EncDecFeatureConverter(pack=False)
    theirs = seqio.get_dataset(
        config.mixture_or_task_name, LENGTHS, converter, 'train', shuffle=False, num_epochs=None, batch_size=5
    )
    assert_same(take(task_batches.TrainBatches(config), 9), list(theirs.take(9).as_numpy_iterator()))


@pytest.mark.parametrize('kind', ['generator', 'cache', 'function'])
def test_a_source_whose_position_cannot_be_saved_raises_an_error(kind):
    def read(split, shuffle_files, seed=None):
        if kind == 'cache':
            return tf.data.Dataset.from_tensor_slices([*'abcdefghij']).cache()
        if kind == 'function':
            letters = tf.data.Dataset.from_tensor_slices([*'abcdefghij'])
            return letters.map(lambda text: tf.ensure_shape(tf.numpy_function(bytes.upper, [text], tf.string), []))
        return tf.data.Dataset.from_generator(lambda: iter('abcdefghij'), output_signature=tf.TensorSpec([], tf.string))

    source = seqio.FunctionDataSource(read, ['train'])
    config = pipeline.DatasetConfig(texts_task(f'no_position_{kind}', source), LENGTHS, batch_size=8)
    assert 'position cannot be saved' in error_message(lambda: task_batches.TrainBatches(config))
    if kind != 'function':
        return
    without_position = dataclasses.replace(config, save_position=False)

    def first_batch(batches_before):
        resumed = pipeline.reseed_resumed_config(without_position, batches_before)
        return next(task_batches.TrainBatches(resumed))['encoder_input_tokens'].tolist()

    assert first_batch(3) != first_batch(0)
    assert pipeline.reseed_resumed_config(config, 3) == config


def test_evaluation_reads_every_example_once(task):
    config = pipeline.DatasetConfig(task, LENGTHS, batch_size=6, split='validation', shuffle=False)
    one_by_one = list(task_batches.EvalBatches(dataclasses.replace(config, batch_size=1)))
    shares = [list(task_batches.EvalBatches(config, share, 2)) for share in (0, 1)]
    assert len(one_by_one) == 13 and len(list(task_batches.EvalBatches(config, limit=1))) == 1
    for name in pipeline.get_batch_shapes(config):
        rows = np.concatenate([part[name] for parts in zip(*shares, strict=True) for part in parts])
        np.testing.assert_array_equal(rows[:13], np.concatenate([batch[name] for batch in one_by_one]))
        assert len(rows) == 18 and not rows[13:].any()


def test_a_mixture_of_tasks_that_are_only_evaluated_is_read(task, tiny):
    """In T5, tasks that are only evaluated have rate 0, such as the only task of `wsc_dpr_simple_proportional` that has
    the split 'validation'.
    """
    mixture = seqio.Mixture('only_evaluated', [(task, 0.0), (tiny.task('tiny_second', validation=9), 0.0)])
    config = pipeline.DatasetConfig(mixture, LENGTHS, batch_size=1, split='validation', shuffle=False)
    assert 9 <= len(list(task_batches.EvalBatches(config))) <= 22


def test_invalid_settings_raise_an_error(task, tiny):
    config, empty = pipeline.DatasetConfig(task, LENGTHS, 4), tiny.task('tiny_none', train=0)
    change = functools.partial(dataclasses.replace, config)
    errors = {
        "train, validation, got 'tset'": lambda: pipeline.get_configured_task(change(split='tset')),
        'no full batch': lambda: next(task_batches.TrainBatches(change(mixture_or_task_name=empty))),
        'use 6': lambda: task_batches.TrainBatches(config, 0, 3),
        'set STREAMS = 2': lambda: task_batches.TrainBatches(change(streams=4), streams=2),
        'multiple of 3, the number of streams, got 4; use 6': lambda: change(streams=3),
        "below TASK_FEATURE_LENGTHS['inputs'] = 16, got (8, 16)": lambda: change(length_buckets=(8, 16)),
        'must be () with PACK = True, got (8,)': lambda: change(length_buckets=(8,), pack=True),
        "with MODEL_TYPE = 'decoder_only'": lambda: change(length_buckets=(8,), model_type='decoder_only'),
        'must be () with STREAMS = 2': lambda: change(length_buckets=(8,), streams=2),
        'set VOCAB_SIZE to 384': lambda: pipeline.prepare_data(config, 256),
    }
    for text, call in errors.items():
        assert text in error_message(call)
    pipeline.prepare_data(config, 359)


def test_saved_positions_are_small(tiny):
    """A position contains the shuffled examples, compressed to about 100 bytes each."""
    config = pipeline.DatasetConfig(tiny.task('tiny_size', train=3000, shuffle_buffer_size=1000), LENGTHS, 4)
    source = task_batches.TrainBatches(config, threads=1)
    next(source)
    assert len(DataPosition.from_states(1, source.capture_states()).to_json()['0']['state']) < 150_000


TEXTS = ['a', 'bcd', 'ef', 'ghijk']


def map_texts(function):
    return tf.data.Dataset.from_tensor_slices(TEXTS).map(function)


def test_autograph_is_only_used_for_functions_that_need_it():
    calls, files = [], []

    def double_long(text):
        calls.append(text)
        if tf.strings.length(text) > 2:
            text = text + text
        return text

    def upper(text):
        files.append(inspect.currentframe().f_code.co_filename)
        return tf.strings.upper(text)

    converted = call_without_autograph(lambda: map_texts(double_long))
    assert [*converted.as_numpy_iterator()] == [b'a', b'bcdbcd', b'ef', b'ghijkghijk'] and len(calls) == 2
    assert [*call_without_autograph(lambda: map_texts(upper)).as_numpy_iterator()] == [b'A', b'BCD', b'EF', b'GHIJK']
    # AutoGraph would call a function in a generated file.
    assert files == [__file__]
