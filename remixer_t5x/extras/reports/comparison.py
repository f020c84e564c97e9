"""Formats the results of `remixer-t5x compare` as tables, figures and a CSV file."""

import csv
import dataclasses
import functools
import math
import pathlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from remixer_t5x.cli.info.model import format_quantity
from remixer_t5x.costs.model_counts import ModelCounts
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import checkpoint_ranking
from remixer_t5x.evaluate.checkpoint_ranking import compute_signed_score
from remixer_t5x.extras.reports import differences, overview
from remixer_t5x.extras.reports.differences import ComparedMeasure
from remixer_t5x.extras.reports.overview import RunOverview
from remixer_t5x.extras.reports.pictures import drawing
from remixer_t5x.extras.reports.pictures.drawing import Picture
from remixer_t5x.extras.reports.run_records import RecordedRun, RunGroup
from remixer_t5x.extras.reports.sweep import Setting, SweepCell, format_setting
from remixer_t5x.run_folder import object_store
from remixer_t5x.train import progress

# The tables show the expected best value after each of these numbers of trials.
_TRIALS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500)


@dataclasses.dataclass(frozen=True)
class SettingSearch:
    """The results of a search over settings with one seed.

    Attributes:
        measure: name of the measure that selects the best setting.
        sign: 1 if a higher value of the measure is better, otherwise -1.
        values: the value of the measure for each model and setting, excluding failed runs.
    """

    measure: str
    sign: int
    cells: Sequence[SweepCell]
    values: Mapping[str, Mapping[Setting, float]]

    @property
    def settings(self) -> list[Setting]:
        return list(dict.fromkeys(cell.setting for cell in self.cells))

    def find_best_setting(self, model: str) -> Setting:
        return max(self.values[model], key=lambda setting: self.sign * self.values[model][setting])

    def compute_expected_best_values(self, model: str) -> list[float]:
        """Returns the expected best value of k random settings, for k = 1, ..., n."""
        values: np.ndarray = self.sign * np.asarray(list(self.values[model].values()))
        return (self.sign * differences.expected_maximum(values)).tolist()


def collect_search_results(cells: Sequence[SweepCell], runs: Mapping[SweepCell, RecordedRun]) -> SettingSearch:
    """Collects the measure of each run of a search.

    The measure is the metric that ranks the checkpoints of the runs' task, the mean over several tasks, or the held-out
    loss if there are no tasks.

    Only uses evaluations during training, which use the validation split. `runs` contains only the runs that succeeded.
    """
    measure, sign = overview.HELD_OUT, -1
    values: dict[str, dict[Setting, float]] = {}
    for cell, run in runs.items():
        metrics: dict[str, tuple[str, float]] = {}
        for kind, record in dataclasses.replace(run, evaluations=()).find_latest_evaluations().items():
            task = kind.partition('/')[2]
            # Numbers that are not finite are recorded as None.
            numbers = {name: math.nan if value is None else value for name, value in record.numbers.items()}
            is_ranked = 'loss' not in numbers and task != checkpoint_ranking.AVERAGE_TASK
            if is_ranked and (metric := checkpoint_ranking.select_ranking_metric(task, numbers, run.best_metrics)):
                metrics[task] = metric
        value = overview.summarize_run(run).held_out
        if metrics:
            measure, sign = _describe_measure([name for name, _ in metrics.values()])
            scores = {task: compute_signed_score(*metric) for task, metric in metrics.items()}
            value = sign * checkpoint_ranking.compute_mean_score(scores)
        if value is not None and math.isfinite(value):
            values.setdefault(cell.model, {})[cell.setting] = value
    if not values:
        raise UserError(
            '--over requires a run with a finite evaluation result to choose the best setting, got none; set '
            'EVAL_PERIOD to a number of steps, or use lower learning rates'
        )
    return SettingSearch(measure, sign, cells, values)


def _describe_measure(metrics: Sequence[str]) -> tuple[str, int]:
    """Returns the name and sign of the measure that combines one metric of each task."""
    signs = {int(compute_signed_score(name, 1)) for name in metrics}
    if len(signs) > 1:
        return "mean of the tasks' metrics, with errors negated", 1
    return metrics[0].removeprefix('-') if len(metrics) == 1 else "mean of the tasks' metrics", signs.pop()


@dataclasses.dataclass(frozen=True)
class ModelComparison:
    """The results of all models and seeds, at the best settings if there was a search.

    Attributes:
        counts: maps each model to its parameter and FLOP counts.
        changes: sentences about the changes that match the costs of the models.
        failed: maps the name of each failed run to the last error in its log.
    """

    groups: Sequence[RunGroup]
    counts: Mapping[str, ModelCounts]
    search: SettingSearch | None = None
    changes: Sequence[str] = ()
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def overviews(self) -> dict[str, RunOverview]:
        return {run.name: overview.summarize_run(run) for group in self.groups for run in group.runs}

    @functools.cached_property
    def metric_rows(self) -> list[overview.MetricRow]:
        return overview.build_task_table(self.groups)

    @functools.cached_property
    def compared_metrics(self) -> list[ComparedMeasure]:
        """The held-out loss and the main metric of each task."""
        return overview.collect_compared_measures(self.groups, self.metric_rows, self.overviews)

    @property
    def difference_sentences(self) -> list[str]:
        return overview.describe_measure_differences(self.compared_metrics, self.overviews)

    @property
    def num_trials(self) -> int:
        """The number of settings that were tried for each model."""
        return len(self.search.settings) if self.search else 1

    @property
    def results_table(self) -> list[tuple[str, list[str]]]:
        """The table rows, as (row label, one cell per model)."""
        columns = [self._build_column(index) for index in range(len(self.groups))]
        names = dict.fromkeys(name for column in columns for name in column)
        return [(name, [column.get(name, '-') for column in columns]) for name in names]

    def _build_column(self, index: int) -> dict[str, str]:
        group = self.groups[index]
        count = self.counts[group.name]
        runs = [self.overviews[run.name] for run in group.runs]
        steps = [run.step for run in runs]
        speeds = [run.tokens_per_second for run in runs if run.tokens_per_second]
        train_losses = [run.train_loss for run in runs if run.train_loss is not None]
        texts = {'best setting': format_setting(self.search.find_best_setting(group.name))} if self.search else {}
        texts |= {
            'parameters': f'{count.total_parameters:,}',
            'forward FLOPs per token': format_quantity(count.total_forward_flops / count.tokens),
            'steps': ' to '.join(f'{step:,}' for step in sorted({min(steps), max(steps)})),
            'seeds': str(len(runs)),
            'time in steps, mean': progress.format_duration(statistics.fmean(run.seconds for run in runs)),
            'tokens/s, mean': f'{statistics.fmean(speeds):,.0f}' if speeds else '-',
            'training loss': _format_mean(train_losses, 4) if train_losses else '-',
        }
        for measure in self.compared_metrics:
            if by_seed := measure.models.get(group.name):
                texts[measure.name] = _format_mean(by_seed.values(), _choose_decimal_places(measure.name))
        for kind, metric, cells, _ in self.metric_rows:
            if cell := cells[index]:
                texts.setdefault(
                    f'{metric} of {kind}', _format_mean(cell.by_seed.values(), _choose_decimal_places(metric))
                )
        texts['E x D x H'] = self._format_cost(group)
        return texts

    def _format_cost(self, group: RunGroup) -> str:
        """Formats HyperMixer's cost E x D x H: training FLOPs per example x examples per run x settings tried."""
        examples = max(self.overviews[run.name].step for run in group.runs)
        examples *= group.runs[0].find_whole_number('BATCH_SIZE') or 1
        return f'{format_quantity(self.counts[group.name].training_flops * examples * self.num_trials)}FLOPs'

    @property
    def search_table(self) -> list[tuple[str, list[str]]]:
        """Rows (setting, measure of each model), followed by rows with the expected best value of k settings."""
        if self.search is None:
            return []
        values = [self.search.values[group.name] for group in self.groups]
        lines = [
            (format_setting(setting), [_format_value(column.get(setting)) for column in values])
            for setting in self.search.settings
        ]
        curves = [dict(enumerate(self.search.compute_expected_best_values(group.name), 1)) for group in self.groups]
        shown = [k for k in range(1, self.num_trials + 1) if k in _TRIALS or k == self.num_trials]
        return lines + [(f'expected best of {k}', [_format_value(curve.get(k)) for curve in curves]) for k in shown]

    def draw_pictures(self) -> list[Picture]:
        """Plots each measure of all seeds."""
        note = 'Each dot is a seed; the line is the mean.'
        return [
            Picture(f'comparison-{number}', measure.name, note, _draw_dot_plot(measure))
            for number, measure in enumerate(self.compared_metrics, 1)
        ]


def write_csv(
    runs: Mapping[SweepCell, RecordedRun],
    failed: Mapping[SweepCell, str],
    counts: Mapping[tuple[str, Setting], ModelCounts],
    path: pathlib.Path,
) -> None:
    """Writes one line per run: setting, parameters, FLOPs, losses, metrics, and the error if any."""
    lines: list[dict[str, Any]] = []
    for cell in (*runs, *failed):
        line = {'model': cell.model, 'setting': format_setting(cell.setting), 'seed': cell.seed, 'folder': cell.folder}
        count = counts[cell.model, cell.setting]
        line |= {'parameters': count.total_parameters}
        line |= {'forward_flops_per_token': count.total_forward_flops / count.tokens}
        if cell in runs:
            numbers = overview.summarize_run(runs[cell])
            line |= {'steps': numbers.step, 'seconds': numbers.seconds, 'tokens_per_second': numbers.tokens_per_second}
            line |= {'training_loss': numbers.train_loss, 'held_out_loss': numbers.held_out}
            for kind, record in runs[cell].find_latest_evaluations().items():
                line |= {f'{kind}/{name}': value for name, value in overview.select_task_metrics(record).items()}
        lines.append(line | {'error': failed.get(cell, '')})
    with object_store.wrap_write_errors(epath.Path(path)), path.open('w', encoding='utf-8', newline='') as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for line in lines for name in line)))
        writer.writeheader()
        writer.writerows(lines)


def _draw_dot_plot(measure: ComparedMeasure) -> Any:
    """Plots a row of dots for each model: the values of its seeds, with a line at their mean."""
    figure = drawing.create_figure(4.4, 0.9 + 0.3 * len(measure.models))
    axes = figure.add_subplot()
    for row, by_seed in enumerate(measure.models.values()):
        values, colour = list(by_seed.values()), drawing.COLOURS[row % len(drawing.COLOURS)]
        axes.plot(values, [row] * len(values), 'o', color=colour, markersize=5, alpha=0.75)
        axes.plot([statistics.fmean(values)] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=1.6)
    axes.set_yticks(range(len(measure.models)), list(measure.models), parse_math=False)
    axes.set_ylim(len(measure.models) - 0.4, -0.6)
    axes.locator_params(axis='x', nbins=6)
    axes.grid(axis='x', color=drawing.GRID, linewidth=0.5)
    drawing.style_axes(axes, '', measure.name)
    return figure


def _choose_decimal_places(measure: str) -> int:
    return 4 if measure == overview.HELD_OUT else 2


def _format_mean(values: Iterable[float], digits: int) -> str:
    """Formats the mean and sample standard deviation as `5.12 ± 0.03`, or only the mean for a single value."""
    cell = overview.TableCell(dict(enumerate(values)))
    return ' ± '.join(f'{value:,.{digits}f}' for value in (cell.mean, cell.standard_deviation) if value is not None)


def _format_value(value: float | None) -> str:
    return '-' if value is None else f'{value:.4g}'
