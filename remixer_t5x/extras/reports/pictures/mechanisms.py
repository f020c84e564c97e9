"""How TIM's mechanisms compete for the tokens of a text (TIM, figures 1 to 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from remixer_t5x.extras.reports.pictures import drawing, learned
from remixer_t5x.extras.reports.pictures.learned import LayerArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PERCENTILES = (10, 50, 90)


def draw_patterns(layers: Sequence[LayerArray], pieces: Sequence[str]) -> Figure:
    """A panel for each mechanism: layers from top to bottom, tokens from left to right, in [0, 1]."""
    count = layers[0].array.shape[0]
    figure = drawing.new_figure(max(5.0, 0.24 * len(pieces) + 1.6), count * (0.28 * len(layers) + 1.25))
    for index, axes in enumerate(figure.subplots(count, 1, squeeze=False)[:, 0]):
        weights = np.stack([layer.array[index] for layer in layers])
        axes.imshow(weights, cmap=drawing.heat_colours(), vmin=0, vmax=1, interpolation='nearest', aspect='auto')
        drawing.style_axes(axes, f'mechanism {index + 1} · 0 to 1')
        drawing.token_ticks(axes, list(pieces), [layer.title for layer in layers])
    return figure


def draw_certainty(layers: Sequence[LayerArray]) -> Figure:
    """Entropy of the competition in each layer over the tokens, and the correlation of the first mechanism's weight.

    With n mechanisms the entropy is log2(n) bits if they share a token equally, and 0 if one mechanism takes it. A
    single layer has no correlation to show.
    """
    figure = drawing.new_figure(7.4, 3.0)
    if len(layers) == 1:
        _draw_entropy(figure.subplots(), layers)
        return figure
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_entropy(left, layers)
    matrix = learned.correlations([layer.array[0] for layer in layers])
    right.imshow(np.abs(matrix), cmap=drawing.heat_colours(), vmin=0, vmax=1, interpolation='nearest')
    for (row, column), value in np.ndenumerate(matrix):
        if len(layers) <= 8:
            right.text(column, row, f'{value:.2f}', ha='center', va='center', color=drawing.INK, fontsize=7)
    drawing.style_axes(right, 'correlation between layers')
    names = [layer.title for layer in layers]
    drawing.token_ticks(right, names, names)
    return figure


def _draw_entropy(axes: Axes, layers: Sequence[LayerArray]) -> None:
    bits = [learned.entropy(layer.array) for layer in layers]
    lines = [[np.percentile(layer, percentile) for layer in bits] for percentile in PERCENTILES]
    places = range(len(layers))
    for index, (percentile, line) in enumerate(zip(PERCENTILES, lines, strict=True)):
        axes.plot(
            places, line, color=drawing.COLOURS[index], marker='o', markersize=3, label=f'{percentile}th percentile'
        )
    drawing.style_axes(axes, 'entropy over tokens', y='bits')
    axes.set_ylim(0, 1.05 * np.log2(layers[0].array.shape[0]))
    drawing.token_ticks(axes, [layer.title for layer in layers])
    axes.legend(frameon=False, fontsize=7, labelcolor=drawing.INK)


def token_ranges(
    layers: Sequence[LayerArray], pieces: Sequence[str], most: int = 24
) -> list[tuple[str, float, float, float]]:
    """(piece, minimum, mean, maximum) weight of the first mechanism over a piece's occurrences in all layers.

    The pieces with the widest ranges, widest first.
    """
    weights = np.stack([layer.array[0] for layer in layers])
    found = []
    for piece in dict.fromkeys(pieces):
        own = weights[:, [index for index, other in enumerate(pieces) if other == piece]]
        found.append((piece, float(own.min()), float(own.mean()), float(own.max())))
    return sorted(found, key=lambda one: one[1] - one[3])[:most]


def draw_ranges(ranges: Sequence[tuple[str, float, float, float]]) -> Figure:
    """A bar from the minimum to the maximum for each piece, with a dot at the mean."""
    figure = drawing.new_figure(5.0, 0.2 * len(ranges) + 0.9)
    axes = figure.subplots()
    places = np.arange(len(ranges))[::-1]
    axes.hlines(
        places, [low for _, low, _, _ in ranges], [high for *_, high in ranges], color=drawing.COLOURS[4], linewidth=3
    )
    axes.plot([mean for _, _, mean, _ in ranges], places, 'o', color=drawing.COLOURS[1], markersize=4)
    drawing.style_axes(axes, x='weight of mechanism 1')
    axes.set_xlim(0, 1)
    axes.set_yticks(places)
    axes.set_yticklabels([drawing.piece_label(piece) for piece, *_ in ranges], fontsize=7, parse_math=False)
    return figure
