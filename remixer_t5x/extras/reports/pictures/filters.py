"""gMLP's spatial filters: the row of W of the token in the middle, layer by layer (Pay Attention to MLPs, figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from remixer_t5x.extras.reports.pictures import drawing
from remixer_t5x.extras.reports.pictures.learned import LayerArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACROSS = 4


def middle_row(layer: LayerArray) -> np.ndarray:
    """W[length // 2], [length]."""
    return layer.array[len(layer.array) // 2]


def asymmetry(row: np.ndarray) -> float:
    """The asymmetry of a filter: -1 if all weights are behind its token, 0 if balanced, 1 if all are ahead.

    `row` belongs to the token in its middle, whose own weight does not count.
    """
    middle = len(row) // 2
    behind, ahead = np.abs(row[:middle]).sum(), np.abs(row[middle + 1 :]).sum()
    return float((ahead - behind) / (ahead + behind)) if ahead + behind else 0.0


def draw(layers: Sequence[LayerArray]) -> Figure:
    """A small plot for each layer; the x-axis is the distance to the token in the middle."""
    across = min(ACROSS, len(layers))
    down = -(-len(layers) // across)
    figure = drawing.new_figure(2.3 * across + 0.4, 1.7 * down + 0.2)
    places = figure.subplots(down, across, squeeze=False).ravel()
    for layer, axes in zip(layers, places, strict=False):
        row = middle_row(layer)
        axes.axhline(0, color=drawing.GRID, linewidth=0.8)
        axes.axvline(0, color=drawing.GRID, linewidth=0.8)
        axes.plot(np.arange(len(row)) - len(row) // 2, row, color=drawing.COLOURS[0], linewidth=1.1)
        drawing.style_axes(axes, layer.title)
        axes.ticklabel_format(axis='y', style='sci', scilimits=(-2, 3))
        axes.yaxis.get_offset_text().set(color=drawing.INK, fontsize=7)
    for axes in places[len(layers) :]:
        axes.set_axis_off()
    return figure
