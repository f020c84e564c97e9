"""Loss curves: numbers read from metrics.jsonl, and their pictures."""

import json

import pytest
from matplotlib.axes import Axes

from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import curves


def write(folder, records):
    path = folder / 'metrics.jsonl'
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))
    return path


RECORDS = [{'kind': 'train', 'step': step, 'loss': 5.0 / step} for step in range(1, 100)]
HELD_OUT = [{'kind': 'validation', 'step': 50, 'loss': 0.2}, {'kind': 'validation', 'step': 99, 'loss': 0.1}]


def test_the_picture_shows_both_curves_and_the_best_constant_prediction(tmp_path, monkeypatch):
    labels = []
    plot = Axes.plot
    monkeypatch.setattr(Axes, 'plot', lambda *args, **rest: labels.append(rest['label']) or plot(*args, **rest))
    records = [*RECORDS, *({**record, 'constant_loss': 4.5} for record in HELD_OUT)]
    png = curves.plot_loss(write(tmp_path, records), tmp_path / 'plots' / 'both.png')
    expected = ['training', 'validation (last: 0.100)', 'best constant prediction (last: 4.500)']
    assert labels == expected and png.read_bytes().startswith(b'\x89PNG')


def test_a_file_without_training_losses_is_reported(tmp_path):
    with pytest.raises(UserError, match='metrics.jsonl has no training loss'):
        curves.plot_loss(tmp_path / 'metrics.jsonl', tmp_path / 'x.png')
    with pytest.raises(UserError, match='metrics.jsonl has no training loss'):
        curves.plot_loss(write(tmp_path, []), tmp_path / 'x.png')
