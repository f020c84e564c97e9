"""Draws arrays of layers as the papers do: matrices over a text, gMLP's filters, TIM's competition of mechanisms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from remixer_t5x.extras.reports.pictures import drawing, learned
from remixer_t5x.extras.reports.pictures.learned import LayerArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# With more pieces than this, labels would overlap; the axes then count tokens.
MOST_LABELS = 48
_FILTERS_IN_A_ROW = 4
_PERCENTILES = (10, 50, 90)


@dataclasses.dataclass(frozen=True)
class Panel:
    """One matrix, [rows, columns], and the pieces of text of its rows and columns, if any.

    `off_diagonal` scales to the values off the diagonal, because the diagonal would hide all others.
    """

    title: str
    weights: np.ndarray
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    off_diagonal: bool = False


def draw_matrices(grid: Sequence[Sequence[Panel]], row_names: Sequence[str] = ()) -> Figure:
    """A row of panels for each of `grid`, named by `row_names`. Each panel is scaled to its own largest magnitude.

    Remixer's softmax(H) under the mean self-attention (REMIXERS, figure 2), attention, pseudo-attention (HyperMixer,
    figures 5 and 6), and gMLP's spatial weights. Negative numbers are drawn by their magnitude; values beyond the scale
    have its darkest colour.
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
    drawing.draw_heat_map(axes, magnitude, largest or 1.0, aspect='auto')
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
    """The asymmetry of a filter: -1 if all weights are behind its token, 0 if balanced, 1 if all are ahead.

    `row` belongs to the token in its middle, whose own weight does not count.
    """
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
        drawing.draw_heat_map(axes, np.stack([layer.array[index] for layer in layers]), 1.0, aspect='auto')
        drawing.style_axes(axes, f'mechanism {index + 1} · 0 to 1')
        drawing.token_ticks(axes, list(pieces), [layer.title for layer in layers])
    return figure


def draw_certainty(layers: Sequence[LayerArray]) -> Figure:
    """Entropy of the competition in each layer over the tokens, and the correlation of the first mechanism's weight.

    With n mechanisms the entropy is log2(n) bits if they share a token equally, and 0 if one mechanism takes it. A
    single layer has no correlation to show.
    """
    figure = drawing.new_figure(7.4, 3.0)
    width = 1 if len(layers) == 1 else 2
    left, *right = figure.subplots(1, width, squeeze=False, width_ratios=(3, 2)[:width])[0]
    names = [layer.title for layer in layers]
    bits = [learned.entropy(layer.array) for layer in layers]
    for colour, percentile in zip(drawing.COLOURS, _PERCENTILES, strict=False):
        values = [np.percentile(layer, percentile) for layer in bits]
        label = f'{percentile}th percentile'
        left.plot(range(len(layers)), values, color=colour, marker='o', markersize=3, label=label)
    drawing.style_axes(left, 'entropy over tokens', y='bits')
    left.set_ylim(0, 1.05 * np.log2(layers[0].array.shape[0]))
    drawing.token_ticks(left, names)
    left.legend(frameon=False, fontsize=7, labelcolor=drawing.INK)
    for axes in right:
        matrix = learned.correlations([layer.array[0] for layer in layers])
        drawing.draw_heat_map(axes, np.abs(matrix), 1.0)
        for (row, column), value in np.ndenumerate(matrix):
            if len(layers) <= 8:
                axes.text(column, row, f'{value:.2f}', ha='center', va='center', color=drawing.INK, fontsize=7)
        drawing.style_axes(axes, 'correlation between layers')
        drawing.token_ticks(axes, names, names)
    return figure


def token_ranges(
    layers: Sequence[LayerArray], pieces: Sequence[str], most: int = 24
) -> list[tuple[str, float, float, float]]:
    """(piece, minimum, mean, maximum) weight of the first mechanism over a piece's occurrences in all layers.

    The pieces with the widest ranges, widest first.
    """
    weights = np.stack([layer.array[0] for layer in layers])
    ranges = []
    for piece in dict.fromkeys(pieces):
        values = weights[:, [index for index, other in enumerate(pieces) if other == piece]]
        ranges.append((piece, float(values.min()), float(values.mean()), float(values.max())))
    return sorted(ranges, key=lambda piece: piece[1] - piece[3])[:most]


def draw_ranges(ranges: Sequence[tuple[str, float, float, float]]) -> Figure:
    """A bar from the minimum to the maximum for each piece, with a dot at the mean."""
    figure = drawing.new_figure(5.0, 0.2 * len(ranges) + 0.9)
    axes = figure.subplots()
    pieces, lows, means, highs = zip(*ranges, strict=True)
    heights = np.arange(len(ranges))[::-1]
    axes.hlines(heights, lows, highs, color=drawing.COLOURS[4], linewidth=3)
    axes.plot(means, heights, 'o', color=drawing.COLOURS[1], markersize=4)
    drawing.style_axes(axes, x='weight of mechanism 1')
    axes.set_xlim(0, 1)
    axes.set_yticks(heights)
    axes.set_yticklabels([drawing.piece_label(piece) for piece in pieces], fontsize=7, parse_math=False)
    return figure
