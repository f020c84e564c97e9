"""The tables of a report: metrics of tasks over seeds, and predictions."""

import collections
import dataclasses
import difflib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.evaluate.best import rank
from remixer_t5x.extras.reports.differences import BySeed, Measure, compare_models, conclusion
from remixer_t5x.extras.reports.overview import MOST_METRICS, Overview, readable_kind, task_metrics
from remixer_t5x.extras.reports.records import Group, Run

HELD_OUT = 'held-out loss'
_SHOWN_PREDICTIONS = 10
_LONGEST_TEXT = 600


@dataclasses.dataclass(frozen=True)
class Cell:
    """One metric of a group of runs.

    Attributes:
        values: (seed, value) of each run.
        best: whether the group is shown to be better than every other one.
    """

    values: Sequence[tuple[int, float]]
    best: bool = False

    @property
    def by_seed(self) -> BySeed:
        return dict(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(value for _, value in self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation (n - 1); None for one run."""
        return statistics.stdev(value for _, value in self.values) if len(self.values) > 1 else None


# The name of an evaluation and of a metric, and a cell for each group of seeds.
Row = tuple[str, str, list[Cell | None]]


def task_table(groups: Sequence[Group]) -> list[Row]:
    """The newest value of each metric; marks a group that is shown to be better than all others.

    Only the first metric of an evaluation with many metrics; `breakdowns` has all of them.
    """
    rows = []
    for kind, names in _metric_names(groups):
        rows += [_row(groups, kind, name) for name in (names[:1] if len(names) > MOST_METRICS else names)]
    return rows


def breakdowns(groups: Sequence[Group]) -> list[tuple[str, list[Row]]]:
    """The name and the rows of each evaluation with many metrics, such as COGS by type."""
    return [
        (readable_kind(kind), [_row(groups, kind, name) for name in names])
        for kind, names in _metric_names(groups)
        if len(names) > MOST_METRICS
    ]


def _metric_names(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Every evaluation of any run, and the names of its metrics in all runs, in order of first appearance."""
    latest = [run.latest() for group in groups for run in group.runs]
    names: dict[str, dict[str, None]] = {}
    for kind, record in (item for records in latest for item in records.items()):
        names.setdefault(kind, {}).update(dict.fromkeys(task_metrics(record)))
    # If `eval` evaluates the same split as training, the same numbers have two names: only the first is shown.
    unique: dict[tuple[object, ...], str] = {}
    for kind in names:
        numbers = [records[kind].numbers if kind in records else None for records in latest]
        unique.setdefault((kind.partition('/')[2] or kind, repr(numbers)), kind)
    return [(kind, list(metrics)) for kind, metrics in names.items() if kind in unique.values()]


def _row(groups: Sequence[Group], kind: str, name: str) -> Row:
    cells: dict[str, Cell] = {}
    keys = [str(index) for index in range(len(groups))]
    for key, group in zip(keys, groups, strict=True):
        values = [
            (run.seed, value)
            for run in group.runs
            if kind in (latest := run.latest()) and (value := task_metrics(latest[kind]).get(name)) is not None
        ]
        if values:
            cells[key] = Cell(values)
    pairs = compare_models({key: cell.by_seed for key, cell in cells.items()}, rank(name, 1.0) > 0)
    wins = collections.Counter(pair.model for pair in pairs if pair.is_shown)
    for key in cells:
        if 0 < wins[key] == len(cells) - 1:
            cells[key] = dataclasses.replace(cells[key], best=True)
    return readable_kind(kind), name, [cells.get(key) for key in keys]


def main_rows(rows: Sequence[Row]) -> list[Row]:
    """The first row of each evaluation, which has its main metric."""
    return list({row[0]: row for row in reversed(rows)}.values())[::-1]


def measures(groups: Sequence[Group], rows: Sequence[Row], overviews: Mapping[str, Overview]) -> list[Measure]:
    """The held-out loss, and the main metric of each evaluation (`rows` of `main_rows`), without empty ones.

    `overviews` has the overview of each run by its name.
    """
    losses: dict[str, BySeed] = {
        group.name: {run.seed: loss for run in group.runs if (loss := overviews[run.name].held_out) is not None}
        for group in groups
    }
    measures = [Measure(HELD_OUT, {name: by_seed for name, by_seed in losses.items() if by_seed}, False)]
    for kind, metric, cells in rows:
        values = {group.name: cell.by_seed for group, cell in zip(groups, cells, strict=True) if cell}
        measures.append(Measure(f'{metric} of {kind}', values, rank(metric, 1.0) > 0))
    return [measure for measure in measures if measure.models]


def headline(measures: Sequence[Measure], overviews: Mapping[str, Overview]) -> list[str]:
    """Sentences on which groups differ in each measure."""
    sentences = [conclusion(measure) for measure in measures if len(measure.models) > 1]
    if sentences and len({overview.step for overview in overviews.values()}) > 1:
        sentences.append('The runs are at different steps.')
    return sentences


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example.

    Attributes:
        input: the input, truncated.
        target: the target, truncated.
        predictions: the prediction of each run as (text, whether it differs from the target), or None.
    """

    input: str
    target: str
    predictions: Sequence[Sequence[tuple[str, bool]] | None]


def samples(runs: Sequence[Run]) -> list[tuple[str, list[Sample], list[str]]]:
    """(task and split, examples, share of each run's predictions that equal the target) for each file of predictions.

    The first half of the examples are wrong predictions of the first run that has the file. All runs show the same
    examples.
    """
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.predictions):
        by_index = [
            {row.get('index', place): row for place, row in enumerate(run.predictions.get(name, ()))} for run in runs
        ]
        first = next(rows for rows in by_index if rows)
        wrong = [index for index, row in first.items() if not is_right(row)]
        right = [index for index, row in first.items() if is_right(row)]
        half = _SHOWN_PREDICTIONS // 2
        indices = wrong[: _SHOWN_PREDICTIONS - min(half, len(right))] + right[:half]
        counts = [
            f'{sum(map(is_right, rows.values())):,} of {len(rows):,} equal the target' if rows else ''
            for rows in by_index
        ]
        tables.append((name, [_sample([rows.get(index) for rows in by_index]) for index in indices], counts))
    return tables


def is_right(row: Mapping[str, Any]) -> bool:
    return str(row['prediction']).split() == str(row.get('target', '')).split()


def _sample(rows: Sequence[Mapping[str, Any] | None]) -> Sample:
    """One example, from its row of each run; None for a run without it."""
    first = next(row for row in rows if row is not None)
    predictions = [
        None if row is None else compare_words(str(row.get('target', '')), str(row['prediction'])) for row in rows
    ]
    return Sample(_truncate(str(first.get('input', ''))), _truncate(str(first.get('target', ''))), predictions)


def compare_words(target: str, prediction: str) -> list[tuple[str, bool]]:
    """The prediction in parts of whole words, each with whether it differs from the target."""
    expected, words = (re.findall(r'\s+|\S+', _truncate(text)) for text in (target, prediction))
    parts = []
    for tag, _, _, first, last in difflib.SequenceMatcher(None, expected, words, autojunk=False).get_opcodes():
        if last > first:
            parts.append((''.join(words[first:last]), tag != 'equal'))
    return parts


def _truncate(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + ' …'
