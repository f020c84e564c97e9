"""Builds the tables of a report: task metrics over seeds, and sample predictions."""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from remixer_t5x.evaluate.best import signed_score
from remixer_t5x.extras.reports.differences import Measure, ValueBySeed, compare_models, describe_differences
from remixer_t5x.extras.reports.overview import MAX_TABLE_METRICS, Overview, format_evaluation_name, task_metrics
from remixer_t5x.extras.reports.records import RecordedRun, RunGroup

HELD_OUT = 'held-out loss'
_SHOWN_PREDICTIONS = 10
_LONGEST_TEXT = 600


@dataclasses.dataclass(frozen=True)
class TableCell:
    """A metric of a group of runs; `best` marks a group that is significantly better than every other group."""

    by_seed: ValueBySeed
    best: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation (n - 1); None for one seed."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


# A table row: (evaluation name, metric name, cell for each group of runs).
MetricRow = tuple[str, str, list[TableCell | None]]


def build_task_table(groups: Sequence[RunGroup]) -> list[MetricRow]:
    """Builds a table of the newest value of each metric, and marks groups that are significantly better than all
    others. For evaluations with many metrics, the table contains only the first metric; see `build_breakdowns`.
    """
    rows = []
    for kind, names in _list_metrics(groups):
        rows += [_build_row(groups, kind, name) for name in (names[:1] if len(names) > MAX_TABLE_METRICS else names)]
    return rows


def build_breakdowns(groups: Sequence[RunGroup]) -> list[tuple[str, list[MetricRow]]]:
    """Builds, for each evaluation with many metrics (such as COGS by type), a table of all metrics."""
    return [
        (format_evaluation_name(kind), [_build_row(groups, kind, name) for name in names])
        for kind, names in _list_metrics(groups)
        if len(names) > MAX_TABLE_METRICS
    ]


def _list_metrics(groups: Sequence[RunGroup]) -> list[tuple[str, list[str]]]:
    """Returns all evaluations and the names of their metrics, in order of first appearance in the runs."""
    latest = [run.latest() for group in groups for run in group.runs]
    names: dict[str, dict[str, None]] = {}
    for kind, record in (item for records in latest for item in records.items()):
        names.setdefault(kind, {}).update(dict.fromkeys(task_metrics(record)))
    # If `remixer-t5x eval` uses the same split as the run, identical results have two names; only the first is shown.
    unique: dict[tuple[object, ...], str] = {}
    for kind in names:
        numbers = [records[kind].numbers if kind in records else None for records in latest]
        unique.setdefault((kind.partition('/')[2] or kind, repr(numbers)), kind)
    return [(kind, list(metrics)) for kind, metrics in names.items() if kind in unique.values()]


def _build_row(groups: Sequence[RunGroup], kind: str, name: str) -> MetricRow:
    cells: dict[str, TableCell] = {}
    keys = [str(index) for index in range(len(groups))]
    for key, group in zip(keys, groups, strict=True):
        by_seed = {
            run.seed: value
            for run in group.runs
            if kind in (latest := run.latest()) and (value := task_metrics(latest[kind]).get(name)) is not None
        }
        if by_seed:
            cells[key] = TableCell(by_seed)
    pairs = compare_models({key: cell.by_seed for key, cell in cells.items()}, signed_score(name, 1.0) > 0)
    wins = collections.Counter(pair.model for pair in pairs if pair.is_shown)
    for key in cells:
        if 0 < wins[key] == len(cells) - 1:
            cells[key] = dataclasses.replace(cells[key], best=True)
    return format_evaluation_name(kind), name, [cells.get(key) for key in keys]


def select_main_rows(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """Selects the row of the main metric of each evaluation, which is the first row."""
    return list({row[0]: row for row in reversed(rows)}.values())[::-1]


def collect_measures(
    groups: Sequence[RunGroup], rows: Sequence[MetricRow], overviews: Mapping[str, Overview]
) -> list[Measure]:
    """Collects the held-out loss and the main metric of each evaluation, if any group has a value."""
    losses: dict[str, ValueBySeed] = {
        group.name: {run.seed: loss for run in group.runs if (loss := overviews[run.name].held_out) is not None}
        for group in groups
    }
    measures = [Measure(HELD_OUT, {name: by_seed for name, by_seed in losses.items() if by_seed}, False)]
    for kind, metric, cells in rows:
        values = {group.name: cell.by_seed for group, cell in zip(groups, cells, strict=True) if cell}
        measures.append(Measure(f'{metric} of {kind}', values, signed_score(metric, 1.0) > 0))
    return [measure for measure in measures if measure.models]


def describe_measures(measures: Sequence[Measure], overviews: Mapping[str, Overview]) -> list[str]:
    """Returns sentences about the differences between groups in each measure."""
    sentences = [describe_differences(measure) for measure in measures if len(measure.models) > 1]
    if sentences and len({overview.step for overview in overviews.values()}) > 1:
        sentences.append('The runs are at different steps.')
    return sentences


class PredictionSample(NamedTuple):
    """An evaluation example and the prediction of each run (None if the run lacks the example)."""

    input: str
    target: str
    predictions: Sequence[str | None]


def select_samples(runs: Sequence[RecordedRun]) -> list[tuple[str, list[PredictionSample], list[str]]]:
    """Returns (task and split, selected examples, accuracy string of each run) for each prediction file.

    Examples that the first run predicts incorrectly come first.
    """
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.predictions):
        by_index = [index_predictions(run, name) for run in runs]
        first = next(rows for rows in by_index if rows)
        indices = sorted(first, key=lambda index: equals_target(first[index]))[:_SHOWN_PREDICTIONS]
        counts = [
            f'{sum(map(equals_target, rows.values())):,} of {len(rows):,} equal the target' if rows else ''
            for rows in by_index
        ]
        samples = [
            PredictionSample(
                _truncate(first[index].get('input', '')),
                _truncate(first[index].get('target', '')),
                [_truncate(rows[index]['prediction']) if index in rows else None for rows in by_index],
            )
            for index in indices
        ]
        tables.append((name, samples, counts))
    return tables


def index_predictions(run: RecordedRun, name: str) -> dict[Any, Mapping[str, Any]]:
    """Returns a dict from example indices to the rows of a prediction file."""
    return {row.get('index', position): row for position, row in enumerate(run.predictions.get(name, ()))}


def equals_target(row: Mapping[str, Any]) -> bool:
    return str(row['prediction']).split() == str(row.get('target', '')).split()


def _truncate(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + ' …'
