"""What scaling.py says of its runs: losses at equal FLOPs, power laws through the best sizes, and their bands.

A model's law `loss = a * FLOPs^-b` goes through the loss of its best size at each budget (mean over seeds). The band
holds 90% of the laws of BOOTSTRAPS samples: each draws seeds of every size with replacement, and adds residuals of the
law, drawn with replacement, to the law.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from library import figures
from library.records import summary
from remixer_t5x.extras.reports.pictures import drawing

BOOTSTRAPS = 1000
BAND = (5, 95)
BASELINE = 't5_1_1'

# model -> size -> runs -> budget -> held-out loss
Losses = dict[str, dict[str, list[dict[float, float]]]]


@dataclasses.dataclass(frozen=True)
class Found:
    """Losses of all runs that are done, and (parameters, FLOPs of a step) of each model and size."""

    losses: Losses
    costs: Mapping[tuple[str, str], tuple[int, float]]


def collect(results: Sequence[tuple[str, str, Mapping[str, Any] | None]]) -> Found:
    """From (model, size, result); a result of None is not yet run."""
    losses: Losses = {}
    costs = {}
    for model, size, result in results:
        runs = losses.setdefault(model, {}).setdefault(size, [])
        if result is not None:
            runs.append({budget: loss for budget, loss in result['points']})
            costs[model, size] = int(result['parameters']), float(result['step_flops'])
    return Found(losses, costs)


def best(by_size: Mapping[str, list[dict[float, float]]], budget: float) -> tuple[float, str] | None:
    """The lowest mean loss over seeds at this budget, and its size; None where no run has one."""
    means = []
    for size, runs in by_size.items():
        values = [run[budget] for run in runs if budget in run]
        if values:
            means.append((float(np.mean(values)), size))
    return min(means) if means else None


def law(budgets: Sequence[float], losses: Sequence[float]) -> tuple[float, float]:
    """(log a, b) of `loss = a * FLOPs^-b` by least squares of the logarithms."""
    slope, intercept = np.polyfit(np.log(budgets), np.log(losses), 1)
    return float(intercept), -float(slope)


def envelope(by_size: Mapping[str, list[dict[float, float]]], budgets: Sequence[float]) -> dict[float, float]:
    found = {budget: best(by_size, budget) for budget in budgets}
    return {budget: point[0] for budget, point in found.items() if point}


def bootstrap(
    by_size: Mapping[str, list[dict[float, float]]], budgets: Sequence[float], count: int = BOOTSTRAPS
) -> np.ndarray:
    """[count, 2] laws (log a, b); none where fewer than three budgets have a loss."""
    points = envelope(by_size, budgets)
    if len(points) < 3:
        return np.empty((0, 2))
    rng, laws = np.random.default_rng(0), []
    for _ in range(count):
        drawn = {size: [runs[i] for i in rng.integers(0, len(runs), len(runs))] for size, runs in by_size.items()}
        again = envelope(drawn, list(points))
        log_a, b = law(list(again), list(again.values()))
        fitted = log_a - b * np.log(list(again))
        residuals = np.log(list(again.values())) - fitted
        # Two numbers were fitted, which makes residuals smaller than the noise.
        residuals = residuals * np.sqrt(len(again) / (len(again) - 2))
        laws.append(law(list(again), np.exp(fitted + rng.choice(residuals, len(again)))))
    return np.asarray(laws)


def print_tables(found: Found, budgets: Sequence[float]) -> None:
    print('\nheld-out loss of each size after a budget of FLOPs: mean over seeds (standard deviation) [seeds]')
    heads = ''.join(f' {budget:.1e} |' for budget in budgets)
    print(f'| model, size | parameters | GFLOPs a step |{heads}')
    print('|---' * (3 + len(budgets)) + '|')
    for model, by_size in found.losses.items():
        for size, runs in by_size.items():
            parameters, flops = found.costs.get((model, size), (0, 0.0))
            values = [[run[budget] for run in runs if budget in run] for budget in budgets]
            cells = ''.join(f' {summary(value, 3) if value else ""} |' for value in values)
            print(f'| {model}, {size} | {parameters:,} | {flops / 1e9:.2f} |{cells}')
    print('\nbest size after a budget of FLOPs, its loss, and what the loss is above or below the loss of ' + BASELINE)
    print(f'| model |{heads} exponent b | 90% of bootstraps |')
    print('|---' * (3 + len(budgets)) + '|')
    for model, by_size in found.losses.items():
        cells = ''.join(f' {_against_baseline(found, model, budget)} |' for budget in budgets)
        laws = bootstrap(by_size, budgets)
        points = envelope(by_size, budgets)
        exponent = f'{law(list(points), list(points.values()))[1]:.4f}' if len(points) > 1 else ''
        band = (
            f'{np.percentile(laws[:, 1], BAND[0]):.4f} to {np.percentile(laws[:, 1], BAND[1]):.4f}' if len(laws) else ''
        )
        print(f'| {model} |{cells} {exponent} | {band} |')


def _against_baseline(found: Found, model: str, budget: float) -> str:
    point, baseline = best(found.losses[model], budget), best(found.losses.get(BASELINE, {}), budget)
    if point is None:
        return ''
    difference = f' ({point[0] - baseline[0]:+.3f})' if baseline and model != BASELINE else ''
    return f'{point[1]}: {point[0]:.3f}{difference}'


def draw(found: Found, budgets: Sequence[float], file: str) -> None:
    """Runs as points, a size a marker; the law and its band."""
    figure = drawing.new_figure(9.6, 4.6)
    axes = figure.subplots()
    grid = np.geomspace(min(budgets), max(budgets), 50)
    for colour, (model, by_size) in zip(drawing.COLOURS, found.losses.items(), strict=False):
        for marker, (size, runs) in zip('osD^v', by_size.items(), strict=False):
            losses = [point for run in runs for point in run.items()]
            if losses:
                axes.plot(
                    *zip(*losses, strict=True), marker, markersize=3.5, color=colour, alpha=0.45, label=f'_{size}'
                )
        points = envelope(by_size, budgets)
        if len(points) < 2:
            continue
        log_a, b = law(list(points), list(points.values()))
        axes.plot(grid, np.exp(log_a - b * np.log(grid)), color=colour, linewidth=1.4, label=f'{model}: b = {b:.3f}')
        laws = bootstrap(by_size, budgets)
        if len(laws):
            curves = np.exp(laws[:, :1] - laws[:, 1:] * np.log(grid))
            axes.fill_between(grid, *np.percentile(curves, BAND, axis=0), color=colour, alpha=0.12, linewidth=0)
    sizes = dict.fromkeys(size for by_size in found.losses.values() for size in by_size)
    for marker, size in zip('osD^v', sizes, strict=False):
        axes.plot([], [], marker, markersize=4, color=drawing.INK, label=f'size {size}')
    axes.set_xscale('log')
    axes.set_yscale('log')
    axes.yaxis.set_major_formatter('{x:g}')
    axes.yaxis.set_minor_formatter('{x:g}')
    axes.grid(color=drawing.GRID, linewidth=0.5)
    title = 'Span corruption: held-out loss by training FLOPs; laws through the best size at each budget, 90% bands'
    drawing.style_axes(axes, title, 'training FLOPs', 'held-out loss')
    axes.legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1.01, 1.02))
    figures.save(figure, file)
