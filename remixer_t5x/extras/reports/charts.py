"""Curves for a page: the points of several runs, smoothed, as paths of an SVG, with ticks at round numbers.

The page's script draws the same paths again when the reader moves the slider. Both use TensorBoard's exponential moving
average with weight w, `sum_k w^(t-k) x_k / sum_k w^(t-k)`.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

Points = Sequence[tuple[int, float]]

SMOOTHING = 0.6
# More points than this are more than pixels, and would make a page with many runs large.
MOST_POINTS = 400
_SIDE = 1000
_FEW_DECADES = 0.7


@dataclasses.dataclass(frozen=True)
class Series:
    """One line; `number` is the number of its run, which sets its colour."""

    label: str
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
    """The moving average of all values so far, weighted by `weight` for each step back."""
    found, total, count = [], 0.0, 0.0
    for value in values:
        total, count = weight * total + value, weight * count + 1.0
        found.append(total / count)
    return found


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most `most` of the points, evenly spaced, with the first and the last."""
    if len(points) <= most:
        return points
    indices = np.linspace(0, len(points) - 1, most).round()
    return [points[int(index)] for index in indices]


def render(chart: Chart) -> dict:
    """The lines, axes and paths of a chart for the page's template and script; numbers are rounded to 5 digits."""
    lines = [dataclasses.replace(line, points=thin(line.points)) for line in chart.lines if line.points]
    shown = [value for line in lines for _, value in line.points]
    steps = [step for line in lines for step, _ in line.points]
    x_low, x_high = min(0, min(steps)), max(max(steps), 1)
    y_low, y_high = _padded(min(shown), max(shown))
    axes: dict[str, list[float]] = {'x': [x_low, x_high], 'y': [y_low, y_high]}
    if min(shown) > 0:
        axes['log'] = [math.log10(min(shown)) - 0.02, math.log10(max(shown)) + 0.02]
    weight = SMOOTHING if chart.smooth else 0.0
    return {
        'title': chart.title,
        'unit': chart.unit,
        'smooth': chart.smooth,
        'axes': axes,
        'x_ticks': [(tick, _place(tick, x_low, x_high)) for tick in _ticks(x_low, x_high)],
        'y_ticks': [(_short(tick), _place(tick, y_low, y_high)) for tick in _ticks(y_low, y_high)],
        'log_ticks': _log_ticks(axes['log'][0], axes['log'][1]) if 'log' in axes else [],
        'lines': [
            {
                'label': line.label,
                'number': line.number,
                'steps': [step for step, _ in line.points],
                'values': [float(f'{value:.5g}') for _, value in line.points],
                'raw': path(line.points, axes),
                'smooth': path(_smooth_points(line.points, weight), axes),
            }
            for line in lines
        ],
    }


def _smooth_points(points: Points, weight: float) -> Points:
    values = moving_average([value for _, value in points], weight)
    return [(step, value) for (step, _), value in zip(points, values, strict=True)]


def path(points: Points, axes: dict) -> str:
    """The points as the `d` of an SVG path in a square of 1000 x 1000, y downwards."""
    (x_low, x_high), (y_low, y_high) = axes['x'], axes['y']
    places = [
        (_SIDE * (step - x_low) / (x_high - x_low), _SIDE * (1 - (value - y_low) / (y_high - y_low)))
        for step, value in points
    ]
    if len(places) == 1:
        # The round caps draw a line of zero length as a dot.
        places *= 2
    return 'M' + 'L'.join(f'{x:.1f} {y:.1f}' for x, y in places)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _place(value: float, low: float, high: float) -> float:
    return round(100 * (value - low) / (high - low), 2)


def _ticks(low: float, high: float) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [round(float(tick), 12) for tick in found if low <= tick <= high]


def _log_ticks(low: float, high: float) -> list[tuple[str, float]]:
    if high - low < _FEW_DECADES:
        # Use round numbers of the linear scale if 1, 2 and 5 are all outside.
        values = _ticks(10**low, 10**high)
    else:
        digits = (1, 2, 5) if high - low < 2 else (1,)
        values = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in digits]
    return [
        (_short(value), _place(math.log10(value), low, high)) for value in values if low <= math.log10(value) <= high
    ]


def _short(value: float) -> str:
    """A short label of a tick: 12k, 0.05, 3e-05."""
    if abs(value) >= 10_000:
        return f'{value / 1e6:g}M' if abs(value) >= 1e6 else f'{value / 1e3:g}k'
    return f'{value:g}'
