"""The loss curve: what is read from metrics.jsonl, and that the picture shows it."""

import json

import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import curves


def write(folder, records, tail=''):
    path = folder / 'metrics.jsonl'
    path.write_text(''.join(json.dumps(record) + '\n' for record in records) + tail)
    return path


RECORDS = [{'kind': 'train', 'step': step, 'loss': 5.0 / step} for step in range(1, 100)]
HELD_OUT = [{'kind': 'validation', 'step': 50, 'loss': 0.2}, {'kind': 'validation', 'step': 99, 'loss': 0.1}]


def test_losses_are_read_by_kind_and_an_unfinished_line_is_left_out(tmp_path):
    path = write(tmp_path, [*RECORDS, *HELD_OUT, {'kind': 'train', 'step': 100, 'loss': None}], tail='{"kind": "tr')
    found = curves.read_series(path, 'loss')
    assert found['train'][:2] == [(1, 5.0), (2, 2.5)] and len(found['train']) == 99
    assert found['validation'] == [(50, 0.2), (99, 0.1)]


def test_the_best_constant_answer_is_a_line(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    lines = []
    monkeypatch.setattr(Axes, 'axhline', lambda self, y, **rest: lines.append(y))
    known = [{**record, 'constant_loss': 4.5 + index} for index, record in enumerate(HELD_OUT)]
    curves.plot_loss(write(tmp_path, [*RECORDS, *known]), tmp_path / 'a.png')
    curves.plot_loss(write(tmp_path, [*RECORDS, *HELD_OUT]), tmp_path / 'b.png')
    assert lines == [5.5]


def test_the_picture_shows_both_curves(tmp_path):
    matplotlib_image = pytest.importorskip('matplotlib.image', reason='matplotlib is not installed')
    both = curves.plot_loss(write(tmp_path, [*RECORDS, *HELD_OUT]), tmp_path / 'plots' / 'both.png')
    alone = curves.plot_loss(write(tmp_path, RECORDS), tmp_path / 'alone.png')

    def reddish(path):
        pixels = matplotlib_image.imread(path)[..., :3]
        return int(np.sum((pixels[..., 0] > 0.6) & (pixels[..., 1] < 0.4)))

    assert reddish(both) > 100 and reddish(alone) == 0


@pytest.mark.parametrize(
    'text, line',
    [
        ('', 'has no training loss; plot a run that has logged at least one step'),
        ('{"kind": "train"}\n', 'line 1 is not a metrics record: it has no `step` that a run can reach; name'),
        ('loss\n', 'line 1 is not a metrics record: invalid JSON (Expecting value: line 1 column 1 (char 0)); name'),
    ],
)
def test_a_file_that_is_no_metrics_file(tmp_path, text, line):
    path = tmp_path / 'metrics.jsonl'
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        curves.plot_loss(path, tmp_path / 'x.png')
    assert str(caught.value).startswith(f'{path} {line}')


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match='cannot be read'):
        curves.plot_loss(tmp_path / 'nowhere.jsonl', tmp_path / 'x.png')


def test_several_runs_share_a_picture_with_a_name_at_every_end(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    labels = []
    annotate = Axes.annotate

    def note(self, text, xy, **rest):
        labels.append((xy[1], text))
        return annotate(self, text, xy, **rest)

    monkeypatch.setattr(Axes, 'annotate', note)
    for name, loss in (('low', 2.0), ('high', 2.01), ('middle', 2.005)):
        lines = [json.dumps({'kind': 'train', 'step': step, 'loss': loss + 3 / step}) for step in range(1, 30)]
        (tmp_path / name).write_text('\n'.join(lines) + '\n')
    files = {name: tmp_path / name for name in ('low', 'high', 'middle')}
    target = curves.plot_runs(files, tmp_path / 'all.png', 'Runs')
    assert target.read_bytes().startswith(b'\x89PNG')
    assert [text.split()[1] for _, text in sorted(labels)] == ['low', 'middle', 'high']
    places = sorted(place for place, _ in labels)
    assert min(b - a for a, b in zip(places, places[1:], strict=False)) > 0.01


def test_a_run_without_losses_is_named(tmp_path):
    (tmp_path / 'empty').write_text('')
    with pytest.raises(UserError, match='empty has no training loss'):
        curves.plot_runs({'a': tmp_path / 'empty'}, tmp_path / 'all.png', 'Runs')
