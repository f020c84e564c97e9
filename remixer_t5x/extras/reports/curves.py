"""Plots the losses of a run as a PNG, and draws the charts of a report."""

import io
import os
from collections.abc import Mapping, Sequence

from etils import epath

from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import overview, run_records
from remixer_t5x.extras.reports.pictures import drawing
from remixer_t5x.extras.reports.pictures.drawing import Picture
from remixer_t5x.extras.reports.run_records import TRAIN, RecordedRun
from remixer_t5x.run_folder import object_store

Points = Sequence[tuple[int, float]]
SMOOTHING = 0.6
# More points would not be visible in a plot, and would increase the size of the page.
MAX_POINTS = 400
_FEW_POINTS = 20
_TRAIN, _HELD_OUT = '#8fb3d9', '#c0392b'


def moving_average(values: Sequence[float], weight: float) -> list[float]:
    """Computes TensorBoard's moving average at each step t: `sum_k weight^(t-k) x_k / sum_k weight^(t-k)`."""
    averages, total, count = [], 0.0, 0.0
    for value in values:
        total, count = weight * total + value, weight * count + 1.0
        averages.append(total / count)
    return averages


def draw_charts(runs: Sequence[RecordedRun], colours: Mapping[str, int]) -> dict[str, list[Picture]]:
    """Draws the page's charts, keyed by the heading 'curves', 'optimization' or 'speed'. Omits empty charts.

    `colours` maps the name of each run to the index of its colour.
    """
    held_out, tasks = [], []
    for kind in dict.fromkeys(kind for run in runs for kind in run.list_evaluation_names()):
        name = overview.format_evaluation_name(kind)
        title = 'Held-out loss' + (f', {name}' if kind != 'eval' else '')
        held_out.append((title, 'mean over targets', kind, 'loss', False))
        of_kind = (record for run in runs for record in run.records if record.kind == kind)
        # The other metrics of a task, such as those of constant predictions, are in its table.
        metrics = [metric for record in of_kind for metric in overview.select_task_metrics(record)]
        tasks += [(f'{name}: {metric}', '', kind, metric, False) for metric in metrics[:1]]
    charts: dict[str, list[tuple[str, str, str, str, bool]]] = {
        'curves': [
            ('Training loss', 'mean over targets', TRAIN, 'loss', True),
            *held_out,
            *tasks,
            ('Training accuracy', 'share of targets', TRAIN, 'accuracy', True),
        ],
        'optimization': [
            ('Learning rate', '', TRAIN, 'learning_rate', False),
            ('Norm of the gradient', '', TRAIN, 'grad_norm', True),
            ('Norm of the parameters', '', TRAIN, 'param_norm', False),
        ],
        'speed': [
            ('Tokens', 'per second', TRAIN, 'tokens_per_second', True),
            ('Model FLOPs utilisation', 'share of the peak', TRAIN, 'mfu', True),
            ('Waiting for data', 'seconds between logs', TRAIN, 'data_wait_seconds', False),
            ('Host memory', 'MiB', TRAIN, 'host_mib', False),
            ('Device memory', 'MiB', TRAIN, 'device_mib', False),
            ('Device memory, peak', 'MiB', TRAIN, 'device_peak_mib', False),
        ],
    }
    return {
        heading: [
            _draw_chart(f'{heading}-{number}', title, unit, lines, smooth)
            for number, (title, unit, kind, metric, smooth) in enumerate(rows)
            if (
                lines := [
                    (colours[run.name], points) for run in runs if (points := run.select_metric_points(kind, metric))
                ]
            )
        ]
        for heading, rows in charts.items()
    }


def _draw_chart(name: str, title: str, unit: str, lines: Sequence[tuple[int, Points]], smooth: bool) -> Picture:
    """Draws the points of each run, with the index of its colour. `smooth` adds a moving average to the raw values."""
    figure = drawing.create_figure(4.6, 2.3)
    axes = figure.add_subplot()
    drawing.style_axes(axes)
    axes.grid(axis='y', color=drawing.GRID, linewidth=0.5)
    axes.locator_params(nbins=6)
    axes.ticklabel_format(axis='both', style='sci', scilimits=(-4, 6), useOffset=False)
    for index, points in lines:
        steps, values = map(list, zip(*drawing.select_evenly_spaced(points, MAX_POINTS), strict=True))
        colour = drawing.COLOURS[index % len(drawing.COLOURS)]
        dashes = '--' if index >= len(drawing.COLOURS) else '-'
        if smooth:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.45)
            values = moving_average(values, SMOOTHING)
        few = not smooth and len(steps) <= _FEW_POINTS
        axes.plot(steps, values, dashes, color=colour, linewidth=1.4, marker='o' if few else None, markersize=3)
    return Picture(name, title, unit, figure)


def plot_loss(metrics_file: str | os.PathLike, png_file: str | os.PathLike, title: str = 'Loss') -> epath.Path:
    """Plots training and held-out loss against the step. Returns the PNG's path, which may be in a bucket.

    Args:
        metrics_file: JSON lines with `kind` ('train' or the name of an evaluation), `step` and `loss`.

    Raises:
        UserError: the file is missing, has a malformed line, or has no training loss.
    """
    run = RecordedRun('', '', run_records.read_metrics_records(metrics_file))
    train = run.select_metric_points(TRAIN, 'loss')
    if not train:
        raise UserError(f'{metrics_file} has no training loss; choose a run that has logged at least one step')
    figure = drawing.create_figure(8, 4.5)
    axes = figure.add_subplot()
    axes.plot(*zip(*train, strict=True), color=_TRAIN, marker='.' if len(train) < 60 else None, label='training')
    for index, kind in enumerate(run.list_evaluation_names()):
        colour = _HELD_OUT if index == 0 else f'C{index}'
        for number, label, style in (('loss', kind, 'o-'), ('constant_loss', 'best constant prediction', ':')):
            if points := run.select_metric_points(kind, number):
                label += f' (last: {points[-1][1]:.3f})'
                axes.plot(*zip(*points, strict=True), style, color=colour, linewidth=2, markersize=4, label=label)
    drawing.style_axes(axes, title, 'step', 'cross-entropy per target token [nats]')
    axes.title.set_fontsize(13)
    axes.grid(axis='y', color=drawing.GRID, linewidth=0.8)
    figure.legend(loc='outside lower center', ncols=2, frameon=False, labelcolor=drawing.TEXT_COLOUR)
    target, png = epath.Path(png_file), io.BytesIO()
    figure.savefig(png, format='png', dpi=150, facecolor='white')
    with object_store.wrap_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(png.getvalue())
    return target
