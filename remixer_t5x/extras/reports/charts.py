"""Plots metrics of several runs; noisy metrics are smoothed by an exponential moving average."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from remixer_t5x.extras.reports.pictures import drawing
from remixer_t5x.extras.reports.pictures.drawing import Picture

Points = Sequence[tuple[int, float]]

SMOOTHING = 0.6
# A plot has no pixels for more points, and a page with many runs would become large.
MOST_POINTS = 400
_FEW_POINTS = 20


@dataclasses.dataclass(frozen=True)
class Series:
    """The curve of one run; `number` is the index of the run and selects its colour."""

    number: int
    points: Points


@dataclasses.dataclass(frozen=True)
class Chart:
    """One plot: title, unit and lines. `smooth` draws the moving average of noisy values."""

    title: str
    unit: str
    lines: Sequence[Series]
    smooth: bool = False


def moving_average(values: Sequence[float], weight: float) -> list[float]:
    """Computes TensorBoard's moving average, `sum_k weight^(t-k) x_k / sum_k weight^(t-k)`, for each step t."""
    averages, total, count = [], 0.0, 0.0
    for value in values:
        total, count = weight * total + value, weight * count + 1.0
        averages.append(total / count)
    return averages


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Returns at most `most` evenly spaced points, including the first and the last."""
    if len(points) <= most:
        return points
    indices = np.linspace(0, len(points) - 1, most).round()
    return [points[int(index)] for index in indices]


def draw(chart: Chart, name: str) -> Picture:
    """Draws a chart. `name` must be unique in the page. Smoothed curves also show the raw values as a thin line."""
    figure = drawing.new_figure(4.6, 2.3)
    axes = figure.add_subplot()
    drawing.style_axes(axes)
    axes.grid(axis='y', color=drawing.GRID, linewidth=0.5)
    axes.locator_params(nbins=6)
    axes.ticklabel_format(axis='both', style='sci', scilimits=(-4, 6), useOffset=False)
    for line in chart.lines:
        steps, values = map(list, zip(*thin(line.points), strict=True))
        colour = drawing.COLOURS[line.number % len(drawing.COLOURS)]
        dashes = '--' if line.number >= len(drawing.COLOURS) else '-'
        if chart.smooth:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.45)
            values = moving_average(values, SMOOTHING)
        few = not chart.smooth and len(steps) <= _FEW_POINTS
        axes.plot(steps, values, dashes, color=colour, linewidth=1.4, marker='o' if few else None, markersize=3)
    return Picture(name, chart.title, chart.unit, figure)
