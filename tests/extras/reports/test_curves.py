"""Loss curves: numbers read from metrics.jsonl, and their pictures."""

import json

import matplotlib.image
import numpy as np
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
    lines = []
    monkeypatch.setattr(Axes, 'axhline', lambda self, y, **rest: lines.append(y))
    known = [{**record, 'constant_loss': 4.5 + index} for index, record in enumerate(HELD_OUT)]
    both = curves.plot_loss(write(tmp_path, [*RECORDS, *known]), tmp_path / 'plots' / 'both.png')
    assert lines == [5.5]
    alone = curves.plot_loss(write(tmp_path, RECORDS), tmp_path / 'alone.png')
    assert lines == [5.5]

    def reddish(path):
        pixels = matplotlib.image.imread(path)[..., :3]
        return int(np.sum((pixels[..., 0] > 0.6) & (pixels[..., 1] < 0.4)))

    assert reddish(both) > 100 and reddish(alone) == 0


def test_a_file_without_training_losses_is_reported(tmp_path):
    with pytest.raises(UserError, match='metrics.jsonl has no training loss'):
        curves.plot_loss(tmp_path / 'metrics.jsonl', tmp_path / 'x.png')
    with pytest.raises(UserError, match='metrics.jsonl has no training loss'):
        curves.plot_loss(write(tmp_path, []), tmp_path / 'x.png')
