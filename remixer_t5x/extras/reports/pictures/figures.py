"""Draws arrays of layers as in the papers: matrices over a text, gMLP's filters, TIM's competition of mechanisms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from remixer_t5x.extras.reports.pictures import drawing
from remixer_t5x.extras.reports.pictures.learned import LayerArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With more pieces than this, labels would overlap, and the axes count tokens instead.
MOST_LABELS = 48
_FILTERS_IN_A_ROW = 4


@dataclasses.dataclass(frozen=True)
class Panel:
    """One matrix, [rows, columns], and the pieces of text of its rows and columns, if any.

    `off_diagonal` scales the colours to the values off the diagonal, if the diagonal would hide them.
    """

    title: str
    weights: np.ndarray
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    off_diagonal: bool = False


def draw_matrices(grid: Sequence[Sequence[Panel]], row_names: Sequence[str] = ()) -> Figure:
    """Draws magnitudes: a row of panels for each of `grid`, labelled by `row_names`, each scaled to its maximum.

    As in REMIXERS, figure 2, and HyperMixer, figures 5 and 6. Values beyond the scale have the darkest colour.
    """
    width = max(len(row) for row in grid)
    size = 2.6 if width > 1 else 4.2
    figure = drawing.new_figure(size * width + 0.9, (size + 0.25) * len(grid) + 0.3)
    for row, (panels, row_axes) in enumerate(zip(grid, figure.subplots(len(grid), width, squeeze=False), strict=True)):
        for column, axes in enumerate(row_axes):
            if column < len(panels):
                _draw_panel(axes, panels[column], is_first=column == 0)
            else:
                axes.set_axis_off()
        if row < len(row_names):
            row_axes[0].set_ylabel(row_names[row], color=drawing.INK, fontsize=9, parse_math=False)
    return figure


def _draw_panel(axes: Axes, panel: Panel, is_first: bool) -> None:
    magnitude = np.abs(np.asarray(panel.weights, np.float64))
    scaled = magnitude[~np.eye(*magnitude.shape, dtype=bool)] if panel.off_diagonal else magnitude
    largest = float(scaled.max(initial=0.0))
    drawing.draw_heat_map(axes, magnitude, largest or 1.0)
    drawing.style_axes(axes, ' · '.join(filter(None, (panel.title, f'to {largest:.2g}'))))
    rows, columns = (
        None if pieces is None or len(pieces) > MOST_LABELS else list(pieces) for pieces in (panel.rows, panel.columns)
    )
    drawing.token_ticks(axes, columns, rows if is_first else None)
    if rows and not is_first:
        axes.set_yticks([])
    axes.spines[['top', 'right']].set_visible(True)
    for spine in axes.spines.values():
        spine.set_color(drawing.GRID)


def middle_row(layer: LayerArray) -> np.ndarray:
    """W[length // 2], [length]."""
    return layer.array[len(layer.array) // 2]


def asymmetry(row: np.ndarray) -> float:
    """The asymmetry of the filter of the middle token: -1 if all weights are behind it, 1 if all are ahead."""
    middle = len(row) // 2
    behind, ahead = np.abs(row[:middle]).sum(), np.abs(row[middle + 1 :]).sum()
    return float((ahead - behind) / (ahead + behind)) if ahead + behind else 0.0


def draw_filters(layers: Sequence[LayerArray]) -> Figure:
    """A small plot of each layer's middle row of W (Pay Attention to MLPs, figure 4) over the distance to its token."""
    width = min(_FILTERS_IN_A_ROW, len(layers))
    height = -(-len(layers) // width)
    figure = drawing.new_figure(2.3 * width + 0.4, 1.7 * height + 0.2)
    grid = figure.subplots(height, width, squeeze=False).ravel()
    for layer, axes in zip(layers, grid, strict=False):
        row = middle_row(layer)
        axes.axhline(0, color=drawing.GRID, linewidth=0.8)
        axes.axvline(0, color=drawing.GRID, linewidth=0.8)
        axes.plot(np.arange(len(row)) - len(row) // 2, row, color=drawing.COLOURS[0], linewidth=1.1)
        drawing.style_axes(axes, layer.title)
        axes.ticklabel_format(axis='y', style='sci', scilimits=(-2, 3))
        axes.yaxis.get_offset_text().set(color=drawing.INK, fontsize=7)
    for axes in grid[len(layers) :]:
        axes.set_axis_off()
    return figure


def draw_competition(layers: Sequence[LayerArray], pieces: Sequence[str]) -> Figure:
    """TIM's mechanisms (figure 1): a panel for each, with layers from top to bottom and tokens from left to right."""
    count = layers[0].array.shape[0]
    figure = drawing.new_figure(max(5.0, 0.24 * len(pieces) + 1.6), count * (0.28 * len(layers) + 1.25))
    for index, axes in enumerate(figure.subplots(count, 1, squeeze=False)[:, 0]):
        drawing.draw_heat_map(axes, np.stack([layer.array[index] for layer in layers]), 1.0)
        drawing.style_axes(axes, f'mechanism {index + 1} · 0 to 1')
        drawing.token_ticks(axes, list(pieces), [layer.title for layer in layers])
    return figure
