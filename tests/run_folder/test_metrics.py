"""Weighted means, metrics.jsonl of resumed runs, TensorBoard files read by TensorFlow, and objects in buckets."""

import json
import math
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.run_folder import metrics, object_store, tensorboard

STEPS = st.lists(
    st.fixed_dictionaries(
        {'loss': st.floats(0, 1e4, width=32), 'weights': st.integers(1, 500), 'correct': st.integers(0, 500)}
    ),
    min_size=1,
    max_size=8,
)


def window_of(steps, totals=None):
    window = metrics.MetricsWindow(totals)
    for step in steps:
        window.add_step_metrics({**{k: jnp.float32(v) for k, v in step.items()}, 'nonfinite': jnp.float32(0)})
    return window.compute_totals()


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_means_are_token_weighted(steps):
    means = metrics.compute_means(window_of(steps))
    weights = sum(step['weights'] for step in steps)
    np.testing.assert_allclose(means['loss'], sum(s['loss'] for s in steps) / weights, rtol=1e-6)
    np.testing.assert_allclose(means['accuracy'], sum(s['correct'] for s in steps) / weights, rtol=1e-6)
    assert means['tokens'] == weights and not {'nonfinite', 'steps'} & set(means)


@settings(max_examples=25, deadline=None)
@given(STEPS, st.integers(0, 8))
def test_a_restored_window_continues_bit_identically(steps, cut):
    saved = json.loads(json.dumps(window_of(steps[:cut])))
    assert window_of(steps[cut:], saved) == window_of(steps)


def test_means_are_computed_for_norms_learning_rate_and_cross_entropy():
    steps = [
        {'loss': 1.0, 'weights': 2.0, 'custom': 3.0, 'grad_norm': g, 'learning_rate': r}
        for g, r in ((1.0, 0.1), (3.0, 0.25))
    ]
    means = metrics.compute_means(window_of(steps))
    assert means['grad_norm'] == 2.0 and means['learning_rate'] == 0.25
    # Custom sums are averaged over targets, like the loss.
    assert means['custom'] == 1.5
    means = metrics.compute_means({'loss': 10.0, 'z_loss': 0.5, 'weights': 4.0, 'steps': 1.0})
    assert means['loss'] == 2.5 and means['cross_ent_loss'] == 9.5 / 4
    means = metrics.compute_means({'loss': 10.0, 'squared_error': 10.0, 'weights': 4.0, 'steps': 1.0})
    assert means == {'loss': 2.5, 'mean_squared_error': 2.5, 'tokens': 4.0}
    assert metrics.compute_means({'loss': 10.0, 'weights': 4.0, 'steps': 1.0})['cross_ent_loss'] == 2.5
    assert metrics.perplexity(2.0) == pytest.approx(math.e**2)
    assert metrics.perplexity(1e4) == math.inf


def test_lines_after_the_restored_step_are_written_again(tmp_path):
    path = epath.Path(tmp_path / 'metrics.jsonl')
    writer = metrics.JsonlWriter(path, 0)
    for step in (10, 20, 30):
        writer.write('train', step, {'loss': 1.0 / step}, {'seconds': 1.0})
    with path.open('a') as file:
        file.write('{"kind": "train", "step": 40, "lo')  # killed while writing
    metrics.JsonlWriter(path, 20).write('eval', 20, {'loss': math.nan}, {})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r['kind'], r['step']) for r in records] == [('train', 10), ('train', 20), ('eval', 20)]
    assert records[0]['loss'] == 0.1 and records[0]['timing'].pop('clock') > 0
    assert records[0]['timing'] == {'seconds': 1.0}
    assert records[2]['loss'] is None
    assert [p.name for p in tmp_path.iterdir()] == ['metrics.jsonl']


def test_a_flush_writes_lines_whose_first_write_failed(tmp_path):
    path = epath.Path(tmp_path / 'metrics.jsonl')
    writer = metrics.JsonlWriter(path, 0)
    path.unlink()
    path.mkdir()
    with pytest.raises(object_store.WriteError):
        writer.write('train', 1, {'loss': 1.0}, {})
    with pytest.raises(object_store.WriteError):
        writer.flush()
    path.rmdir()
    writer.flush()
    assert [record['step'] for record in metrics.read_records(path)] == [1]


def records_of(path):
    """Yields the payloads of a TFRecord file: length, its checksum, payload, checksum."""
    data = path.read_bytes()
    while data:
        (size,) = struct.unpack('<Q', data[:8])
        yield data[12 : 12 + size]
        data = data[16 + size :]


@pytest.mark.parametrize('restored_step', [-1, 7])
def test_tensorflow_reads_all_values_of_tensorboard_files(tmp_path, restored_step):
    event_pb2 = pytest.importorskip('tensorflow.core.util.event_pb2')
    writer = tensorboard.TensorBoardWriter(epath.Path(tmp_path), restored_step)
    writer.write('train', 10, {'loss': 2.5}, {'tokens_per_second': 100.0})
    writer.write('eval', 20, {'loss': 2.25}, {})
    (path,) = tmp_path.iterdir()
    values = {}
    # Read the file before it is closed, because a killed run does not close it.
    events = [event_pb2.Event.FromString(record) for record in records_of(path)]
    writer.close()
    # TensorBoard hides the metrics of an earlier run in the same folder, which had no checkpoint.
    assert [event.step for event in events if event.session_log.status] == [restored_step + 1]
    for event in events:
        for value in event.summary.value:
            values[value.tag, event.step] = value.simple_value
    assert values == {('train/loss', 10): 2.5, ('train/tokens_per_second', 10): 100.0, ('eval/loss', 20): 2.25}


def test_tensorboard_reads_the_files_in_order_although_the_clock_was_set_back(tmp_path, monkeypatch):
    for step, now in ((-1, 9 * 10**18), (7, 8 * 10**18), (8, 8 * 10**18)):
        monkeypatch.setattr(tensorboard.time, 'time_ns', lambda now=now: now)
        tensorboard.TensorBoardWriter(epath.Path(tmp_path), step).close()
    event_pb2 = pytest.importorskip('tensorflow.core.util.event_pb2')
    events = [event_pb2.Event.FromString(record) for path in sorted(tmp_path.iterdir()) for record in records_of(path)]
    assert [event.step for event in events if event.session_log.status] == [0, 8, 9]


def test_uploads_are_periodic_and_repeated_after_a_failure(tmp_path, monkeypatch):
    """A local folder replaces the bucket."""
    monkeypatch.setattr(object_store, 'UPLOAD_SECONDS', 1e9)
    folder = epath.Path(tmp_path) / 'absent'
    lines = object_store.GrowingObject(folder / 'lines', b'a\n')
    # Uploads fail while the folder does not exist.
    lines.upload_if_due()
    with pytest.raises(FileNotFoundError):
        lines.flush()
    folder.mkdir()
    lines.flush()
    lines.write(b'b\n')
    lines.upload_if_due()
    assert (folder / 'lines').read_bytes() == b'a\n'
    lines.flush()
    assert (folder / 'lines').read_bytes() == b'a\nb\n'
