"""Each epoch of every source has each row exactly once, in a different order, also after a resume."""

import json

import numpy as np
import pytest
import seqio

from remixer_t5x.data.pipeline import DatasetConfig
from remixer_t5x.data.task_batches import TrainBatches
from remixer_tasks import c4, catalogue, huggingface_datasets, local_pairs, text_pairs, vocabularies
from tests.support import toy_tasks

ROWS = 120
BYTES = vocabularies.byte()


def write_rows(path, make, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(make(row)) + '\n' for row in rows))
    return str(path)


def text_pair(row):
    return {'inputs': f'row {row}', 'targets': 'x'}


def rte_row(row):
    return {'premise': f'row {row}', 'hypothesis': '', 'label': 'entailment', 'idx': row}


def pairs(folder, rows):
    held_out = write_rows(folder / 'held_out.jsonl', text_pair, [-1])
    path = write_rows(folder / 'pairs.jsonl', text_pair, range(rows))
    return text_pairs.task(local_pairs.corpus(path, validation_files=held_out), BYTES)


def published_files(folder, rows):
    write_rows(folder / 'super_glue' / 'RTE' / 'train.jsonl', rte_row, range(rows))
    return catalogue.task('super_glue_rte_v102', BYTES, str(folder))


def tfds_benchmark(folder, rows):
    write_rows(folder / 'raw' / 'train.jsonl', rte_row, range(rows))
    toy_tasks.prepare_super_glue('rte', folder / 'raw', folder / 'tfds')
    return catalogue.task('super_glue_rte_v102', BYTES, str(folder / 'tfds'))


def text_task(corpus, field='text'):
    """Returns a task whose examples are the documents, in the order of the source."""

    def to_text(dataset):
        return dataset.map(lambda example: {'inputs': example[field], 'targets': 'x'})

    feature = seqio.Feature(BYTES, add_eos=True)
    steps = [to_text, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos]
    return seqio.Task(
        'text', corpus.create_source(), dict.fromkeys(('inputs', 'targets'), feature), steps, shuffle_buffer_size=1
    )


def tfds_text(folder, rows):
    tfds_benchmark(folder, rows)
    return text_task(c4.corpus('super_glue/rte:1.0.2', str(folder / 'tfds')), 'premise')


def hub_stream(folder, rows):
    for file in range(3):
        write_rows(folder / f'train-{file}.jsonl', text_pair, range(file * rows // 3, (file + 1) * rows // 3))
    write_rows(folder / 'validation.jsonl', text_pair, [-1])
    dataset = huggingface_datasets.HubDataset(str(folder), validation_split='validation')
    return text_task(huggingface_datasets.corpus(dataset, 'inputs', streaming=True))


INDEXED = [pairs, published_files]


def draw_batches(batches, count):
    """Returns the inputs of the next `count` batches, as lists of rows."""
    return [[row.tobytes() for row in next(batches)['encoder_input_tokens']] for _ in range(count)]


def train_batches(task, batch_size, streams=1):
    return TrainBatches(DatasetConfig(task, {'inputs': 48, 'targets': 24}, batch_size, streams=streams))


@pytest.mark.parametrize(
    ('make', 'streams'),
    [*((make, 1) for make in [*INDEXED, tfds_text, hub_stream]), (pairs, 2), (tfds_benchmark, 2)],
)
def test_every_epoch_has_each_row_once_in_a_different_order(tmp_path, make, streams):
    """A run that is resumed at the end of an epoch, and again within an epoch, continues with the same rows."""
    task, size = make(tmp_path, ROWS), 24 if streams == 2 else 25
    batches = train_batches(task, size, streams)
    rows = draw_batches(batches, 5)
    position = batches.capture_states()
    rows += draw_batches(batches, 10)
    for start, end in ((5, 13), (13, 15)):
        resumed = train_batches(task, size, streams)
        resumed.restore_states(position)
        assert draw_batches(resumed, end - start) == rows[start:end]
        position = resumed.capture_states()
    if make is pairs and streams == 2:
        assert [set(batch) for batch in draw_batches(train_batches(task, size), len(rows))] == [*map(set, rows)]
    epochs = np.array(sum(rows, [])[: 3 * ROWS], object).reshape(3, ROWS).tolist()
    assert all(len(set(epoch)) == ROWS for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    if make in INDEXED:
        # After a full shuffle, the mean distance of a row from its position in the file is a third of the rows.
        position = {row: number for number, row in enumerate(sorted(epochs[0]))}
        distance = np.mean([abs(position[row] - number) for number, row in enumerate(epochs[1])]) / ROWS
        assert 0.25 < distance < 0.42


@pytest.mark.parametrize('make', [pairs, tfds_benchmark])
def test_tasks_read_by_seqio_have_epochs_and_equal_shards(tmp_path, make):
    task = make(tmp_path, 11)

    def rows(**settings):
        dataset = task.get_dataset({'inputs': 24, 'targets': 4}, shuffle=True, seed=3, **settings)
        return [row['inputs_pretokenized'] for row in dataset.as_numpy_iterator()]

    once, twice = rows(), rows(num_epochs=2)
    assert len(set(once)) == len(once) == 11
    assert set(twice[:11]) == set(twice[11:]) == set(once) and twice[:11] != twice[11:]
    shards = [rows(shard_info=seqio.ShardInfo(index, 3)) for index in range(3)]
    assert sorted(sum(shards, [])) == sorted(once)
    if make is pairs:
        assert [len(shard) for shard in shards] == [4, 4, 3]
