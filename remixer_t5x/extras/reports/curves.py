"""The loss curve of a run as a PNG, from its `metrics.jsonl`."""

import io
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from etils import epath

from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import records
from remixer_t5x.run_folder import object_store

_INK, _TRAIN, _HELD_OUT = '#333333', '#8fb3d9', '#c0392b'
Points = list[tuple[int, float]]


def plot_loss(metrics_file: str | os.PathLike, png_file: str | os.PathLike, title: str = 'Loss') -> epath.Path:
    """Draws training and held-out loss over steps and returns the path of the PNG, which may be in a bucket.

    Args:
        metrics_file: JSON lines with `kind` ('train', or an evaluation's name), `step` and `loss`.

    Raises:
        UserError: the file is missing, holds a malformed line, or has no training loss in it.
    """
    curves = read_losses(metrics_file)
    train = curves.pop('train', [])
    if not train:
        raise UserError(f'{metrics_file} has no training loss; plot a run that has logged at least one step')
    # Uses the canvas instead of pyplot, which has global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_columns(train), color=_TRAIN, linewidth=1.6, marker='.' if len(train) < 60 else None, label='training')
    for index, (kind, points) in enumerate(curves.items()):
        label = 'held out' if len(curves) == 1 else f'held out: {kind}'
        _draw_held_out(axes, points, label, _HELD_OUT if index == 0 else f'C{index}')
    constant = _constant_loss(metrics_file)
    if constant is not None:
        axes.axhline(constant, color=_INK, linewidth=1.2, linestyle=':', label='best constant answer')
    _style_axes(axes, title)
    target, png = epath.Path(png_file), io.BytesIO()
    figure.savefig(png, format='png')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(png.getvalue())
    except object_store.errors() as error:
        raise UserError(
            f'{target} cannot be written ({object_store.reason(error)}); give a path in a folder that you can write to'
        ) from None
    return target


def plot_runs(metrics_files: Mapping[str, str | os.PathLike], png_file: str | os.PathLike, title: str) -> pathlib.Path:
    """Draws the training losses of several runs, smoothed over ten logged steps, and returns the path of the PNG.

    Args:
        metrics_files: the metrics file of each run by its label.

    Raises:
        UserError: a file is missing, holds a malformed line, or has no training loss in it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=150, layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends = []
    for index, (label, file) in enumerate(metrics_files.items()):
        train = read_losses(file).get('train', [])
        if not train:
            raise UserError(f'{file} has no training loss; plot a run that has logged at least one step')
        steps, losses = _columns(train)
        smooth = [sum(losses[max(0, i - 9) : i + 1]) / len(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        axes.plot(steps, smooth, color=f'C{index % 10}', linestyle='-' if index < 10 else '--', linewidth=1.6)
        ends.append((smooth[-1], label, f'C{index % 10}', steps[-1]))
    _label_ends(axes, ends)
    _style_axes(axes, title)
    target = pathlib.Path(png_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    return target


def _label_ends(axes: Any, ends: list[tuple[float, str, str, int]]) -> None:
    """Writes names next to the last points, in the order of the losses, and moves a name up if it would cover
    another.
    """
    low, high = axes.get_ylim()
    place = low
    for loss, label, color, step in sorted(ends):
        place = max(loss, place + (high - low) / 28)
        axes.annotate(f'{loss:.3f} {label}', (step, place), xytext=(6, 0), textcoords='offset points', va='center',
                      color=color, fontsize=8, annotation_clip=False)  # fmt: skip


def _draw_held_out(axes: Any, points: Points, label: str, color: str) -> None:
    axes.plot(*_columns(points), color=color, linewidth=2, marker='o', markersize=4, label=label)
    axes.annotate(
        f'{points[-1][1]:.3f}', points[-1], xytext=(0, 8), textcoords='offset points', ha='right', color=color
    )


def _columns(points: Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]


def _style_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc='left', color=_INK, fontsize=13)
    axes.set_xlabel('step', color=_INK)
    axes.set_ylabel('cross-entropy per target token [nats]', color=_INK)
    axes.grid(axis='y', color='#dddddd', linewidth=0.8)
    axes.spines[['top', 'right']].set_visible(False)
    axes.tick_params(colors=_INK)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, labelcolor=_INK)


def read_losses(metrics_file: str | os.PathLike) -> dict[str, Points]:
    """(step, loss) pairs by kind, in the order of the file, without losses that were not finite (null).

    Raises:
        UserError: the file cannot be read, or one of its lines is not a metrics record.
    """
    curves: dict[str, Points] = {}
    for record in records.read(metrics_file):
        loss = record.numbers.get('loss')
        if loss is not None:
            curves.setdefault(record.kind, []).append((record.step, loss))
    return curves


def _constant_loss(metrics_file: str | os.PathLike) -> float | None:
    """The newest loss of the best constant answer, of the first evaluation that has one."""
    found: dict[str, float] = {}
    for record in records.read(metrics_file):
        value = record.numbers.get('constant_loss')
        if value is not None:
            found[record.kind] = value
    return next(iter(found.values()), None)
