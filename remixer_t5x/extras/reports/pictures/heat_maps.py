"""Matrices of layers side by side, with the pieces of a text along their edges.

Remixer's softmax(H) under the mean self-attention (REMIXERS, figure 2), attention and cross-attention, pseudo-attention
(HyperMixer, figures 5 and 6), and gMLP's spatial weights as matrices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from remixer_t5x.extras.reports.pictures import drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# More pieces than this would cover each other; the axes then count tokens.
MOST_LABELS = 48


@dataclasses.dataclass(frozen=True)
class Panel:
    """One matrix, [rows, columns], and the pieces of text of its rows and columns, if any.

    `beside_diagonal` scales to the values off the diagonal, because the diagonal would hide everything else.
    """

    title: str
    weights: np.ndarray
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    beside_diagonal: bool = False


def draw(grid: Sequence[Sequence[Panel]], row_names: Sequence[str] = ()) -> Figure:
    """A row of panels for each of `grid`, named by `row_names`. Each panel is scaled to its own largest magnitude.

    Negative numbers are drawn by their magnitude; values beyond the scale have its darkest colour.
    """
    across = max(len(row) for row in grid)
    size = 2.6 if across > 1 else 4.2
    figure = drawing.new_figure(size * across + 0.9, (size + 0.25) * len(grid) + 0.3)
    axes = figure.subplots(len(grid), across, squeeze=False)
    for row, (panels, places) in enumerate(zip(grid, axes, strict=True)):
        for column, place in enumerate(places):
            if column >= len(panels):
                place.set_axis_off()
                continue
            _draw_panel(place, panels[column], first=column == 0)
        if row < len(row_names):
            places[0].set_ylabel(row_names[row], color=drawing.INK, fontsize=9, parse_math=False)
    return figure


def _draw_panel(axes: Axes, panel: Panel, first: bool) -> None:
    magnitude = np.abs(np.asarray(panel.weights, np.float64))
    scaled = magnitude[~np.eye(*magnitude.shape, dtype=bool)] if panel.beside_diagonal else magnitude
    largest = float(scaled.max(initial=0.0))
    axes.imshow(
        magnitude, cmap=drawing.heat_colours(), vmin=0, vmax=largest or 1.0, interpolation='nearest', aspect='auto'
    )
    drawing.style_axes(axes, ' · '.join(filter(None, (panel.title, f'to {largest:.2g}'))))
    rows, columns = (
        labels if labels is None or len(labels) <= MOST_LABELS else None for labels in (panel.rows, panel.columns)
    )
    drawing.token_ticks(axes, list(columns) if columns else None, list(rows) if rows and first else None)
    if rows and not first:
        axes.set_yticks([])
    axes.spines[['top', 'right']].set_visible(True)
    for spine in axes.spines.values():
        spine.set_color(drawing.GRID)
