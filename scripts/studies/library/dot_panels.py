"""Panels with a row for each model: a dot for each seed, and a line at the mean."""

from collections.abc import Mapping, Sequence

import numpy as np

from library import figures

# The name of a panel, and for each series in it its label and the name of its metric in a result.
Panel = tuple[str, Mapping[str, str]]


def draw(
    found: Mapping[str, list[dict[str, float]]],
    panels: Sequence[Panel],
    file: str,
    dotted: Mapping[str, float] | None = None,
) -> None:
    """Writes a PNG. `found`: results of each model; `dotted`: a line of reference in the panels of these names."""
    from remixer_t5x.extras.reports.pictures import drawing

    shown = {model: results for model, results in found.items() if results}
    figure = drawing.new_figure(2.2 + 2.6 * len(panels), 0.9 + 0.42 * len(shown))
    all_axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    for axes, (name, series) in zip(all_axes, panels, strict=True):
        lifts = (0.14, -0.14) if len(series) == 2 else (0.0,)
        for (label, metric), colour, lift in zip(series.items(), drawing.COLOURS, lifts, strict=False):
            for row, results in enumerate(shown.values()):
                values, height = [result[metric] for result in results], row - lift
                axes.plot(values, [height] * len(values), 'o', markersize=4, color=colour, alpha=0.6,
                          label=label if row == 0 and len(series) > 1 else None)  # fmt: skip
                axes.plot([np.mean(values)] * 2, [height - 0.12, height + 0.12], color=colour, linewidth=2)
        drawing.style_axes(axes, '', name, '')
        axes.grid(color=drawing.GRID, linewidth=0.5)
        if dotted and name in dotted:
            axes.axvline(dotted[name], color=drawing.INK, linewidth=1, linestyle=':')
    all_axes[0].set_yticks(range(len(shown)), list(shown))
    all_axes[0].invert_yaxis()
    if any(len(series) > 1 for _, series in panels):
        all_axes[-1].legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1.01, 1.02))
    figures.save(figure, file)
