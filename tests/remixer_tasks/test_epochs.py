"""Epochs of finetuning: each row exactly once, in another order each time, for any number of streams and resumes."""

import json

import numpy as np
import pytest
import seqio

from remixer_t5x.data.pipeline import DatasetConfig
from remixer_t5x.data.task_batches import TrainBatches
from remixer_tasks import catalogue, local_pairs, text_pairs, vocabularies

LENGTHS = {'inputs': 24, 'targets': 4}
ROWS = 990


def pairs(folder, rows=ROWS):
    path, held_out = folder / 'pairs.jsonl', folder / 'held_out.jsonl'
    path.write_text(''.join(json.dumps({'inputs': f'row {row}', 'targets': 'x'}) + '\n' for row in range(rows)))
    held_out.write_text('{"inputs": "held out", "targets": "x"}\n')
    corpus = local_pairs.corpus(str(path), validation_files=str(held_out))
    return text_pairs.task(corpus, vocabularies.byte())


def labelled(folder, rows=ROWS):
    examples = [{'premise': f'P {row}', 'hypothesis': '', 'label': 'entailment', 'idx': row} for row in range(rows)]
    (folder / 'super_glue' / 'RTE').mkdir(parents=True)
    text = ''.join(json.dumps(example) + '\n' for example in examples)
    (folder / 'super_glue' / 'RTE' / 'train.jsonl').write_text(text)
    return catalogue.task('super_glue_rte_v102', vocabularies.byte(), str(folder))


def drawn(batches, count):
    """The inputs of the next `count` batches, as lists of rows."""
    return [[row.tobytes() for row in next(batches)['encoder_input_tokens']] for _ in range(count)]


@pytest.mark.parametrize('make', [pairs, labelled])
@pytest.mark.parametrize('streams', [1, 6])
def test_every_row_once_in_each_epoch(tmp_path, make, streams):
    config = DatasetConfig(make(tmp_path), LENGTHS | {'inputs': 48}, batch_size=30, streams=streams)
    epochs = np.array(drawn(TrainBatches(config), 3 * ROWS // 30), object).reshape(3, ROWS).tolist()
    assert all(len(set(epoch)) == ROWS for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    # A full shuffle: a row is as far from its place in the file as in a random order, where the mean is a third.
    place = {row: number for number, row in enumerate(sorted(epochs[0]))}
    moved = np.mean([abs(place[row] - number) for number, row in enumerate(epochs[1])]) / ROWS
    assert 0.3 < moved < 0.37


def test_batches_have_the_same_rows_for_any_number_of_streams(tmp_path):
    """And after a resume in the second epoch."""
    task = pairs(tmp_path, 100)

    def batches(streams):
        return TrainBatches(DatasetConfig(task, LENGTHS, batch_size=20, streams=streams))

    rows = drawn(batches(1), 20)
    assert [set(batch) for batch in rows] == [set(batch) for batch in drawn(batches(5), 20)]
    again = batches(1)
    drawn(again, 7)
    resumed = batches(1)
    resumed.restore(again.capture())
    assert drawn(resumed, 13) == rows[7:]


@pytest.mark.parametrize('make', [pairs, labelled])
def test_seqio_alone_gives_an_epoch_and_repeats_it_in_another_order(tmp_path, make):
    task = make(tmp_path, 40)

    def rows(**settings):
        dataset = task.get_dataset(LENGTHS, shuffle=True, seed=3, **settings)
        return [row['inputs_pretokenized'] for row in dataset.as_numpy_iterator()]

    assert len(set(rows())) == len(rows()) == 40
    twice = rows(num_epochs=2)
    assert set(twice[:40]) == set(twice[40:]) == set(rows()) and twice[:40] != twice[40:]
    for count in (3, 64):
        shards = [rows(shard_info=seqio.ShardInfo(index, count)) for index in range(count)]
        assert sorted(sum(shards, [])) == sorted(rows())
        assert [len(shard) for shard in shards] == [-(-(40 - index) // count) for index in range(count)]


@pytest.mark.parametrize('make', [pairs, labelled])
def test_a_position_in_any_epoch_continues_with_the_same_rows(tmp_path, make):
    """13 rows in batches of 3: each position is in another place of its epoch."""
    task = make(tmp_path, 13)

    def batches():
        return TrainBatches(DatasetConfig(task, LENGTHS, batch_size=3))

    unbroken, states, rows = batches(), [], []
    for _ in range(30):
        states.append(unbroken.capture())
        rows += drawn(unbroken, 1)
    for number in range(0, 30, 4):
        resumed = batches()
        resumed.restore(states[number])
        assert drawn(resumed, 30 - number) == rows[number:]
