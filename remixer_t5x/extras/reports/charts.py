"""Curves of several runs as figures for a page; noisy numbers are smoothed by an exponential moving average."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from remixer_t5x.extras.reports.pictures import drawing
from remixer_t5x.extras.reports.pictures.drawing import Picture

Points = Sequence[tuple[int, float]]

SMOOTHING = 0.6
# More points than this are more than pixels, and would make a page with many runs large.
MOST_POINTS = 400
_FEW_POINTS = 20


@dataclasses.dataclass(frozen=True)
class Series:
    """One line; `number` is the number of its run, which sets its colour."""

    number: int
    points: Points


@dataclasses.dataclass(frozen=True)
class Chart:
    """A title, the unit of the numbers, and the lines. `smooth` marks noisy numbers, which are drawn smoothed."""

    title: str
    unit: str
    lines: Sequence[Series]
    smooth: bool = False


def moving_average(values: Sequence[float], weight: float) -> list[float]:
    """TensorBoard's moving average, `sum_k weight^(t-k) x_k / sum_k weight^(t-k)` for each t."""
    averages, total, count = [], 0.0, 0.0
    for value in values:
        total, count = weight * total + value, weight * count + 1.0
        averages.append(total / count)
    return averages


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` of the points, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return points
    indices = np.linspace(0, len(points) - 1, most).round()
    return [points[int(index)] for index in indices]


def draw(chart: Chart, name: str) -> Picture:
    """Draws a chart; `name` is unique in the page. The raw numbers of a smoothed line are drawn thin behind it."""
    figure = drawing.new_figure(4.6, 2.3)
    axes = figure.add_subplot()
    drawing.style_axes(axes)
    axes.grid(axis='y', color=drawing.GRID, linewidth=0.5)
    axes.locator_params(nbins=6)
    axes.ticklabel_format(axis='both', style='sci', scilimits=(-4, 6), useOffset=False)
    for line in chart.lines:
        steps, values = zip(*thin(line.points), strict=True)
        colour = drawing.COLOURS[line.number % len(drawing.COLOURS)]
        dashes = '--' if line.number >= len(drawing.COLOURS) else '-'
        if chart.smooth:
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.45)
            values = moving_average(values, SMOOTHING)
        few = not chart.smooth and len(steps) <= _FEW_POINTS
        axes.plot(steps, values, dashes, color=colour, linewidth=1.4, marker='o' if few else None, markersize=3)
    return Picture(name, chart.title, chart.unit, figure)
