"""The tables of a report: metrics of tasks over seeds, predictions, and labels by predictions."""

from __future__ import annotations

import collections
import dataclasses
import difflib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x.extras.reports.overview import MOST_METRICS, Overview, readable, task_metrics, unit
from remixer_t5x.extras.reports.records import Group, Record, Run

_SHOWN_PREDICTIONS = 10
_LONGEST_TEXT = 600
# With more different targets than this, or as many as half of the examples, targets are answers and not labels.
MOST_LABELS = 12
_LONGEST_LABEL = 40


@dataclasses.dataclass(frozen=True)
class Cell:
    """The mean over the runs of a group, its standard deviation (None for one run), and the number of runs."""

    mean: float
    deviation: float | None
    count: int
    best: bool = False


# The name of an evaluation and of a metric, and a cell for each group of seeds.
Row = tuple[str, str, list[Cell | None]]


def cell(values: Sequence[float]) -> Cell:
    """The cell of one metric over seeds, with the sample standard deviation (n - 1)."""
    return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def task_table(groups: Sequence[Group]) -> list[Row]:
    """The newest values of each metric; the highest mean of a row is marked.

    Of an evaluation with many metrics the first; `breakdowns` has all of them.
    """
    rows = []
    for kind, names in _metric_names(groups):
        rows += [_row(groups, kind, name) for name in (names[:1] if len(names) > MOST_METRICS else names)]
    return rows


def breakdowns(groups: Sequence[Group]) -> list[tuple[str, list[Row]]]:
    """The name and the rows of each evaluation with many metrics, such as COGS by type."""
    return [
        (readable(kind), [_row(groups, kind, name) for name in names])
        for kind, names in _metric_names(groups)
        if len(names) > MOST_METRICS
    ]


def _metric_names(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Every evaluation of any run, and the names of its metrics in all runs, in order of first appearance."""
    latest = [run.latest() for group in groups for run in group.runs]
    names: dict[str, dict[str, None]] = {}
    for kind, record in (item for records in latest for item in records.items()):
        names.setdefault(kind, {}).update(dict.fromkeys(task_metrics(record)))
    # If `eval` evaluates the split that training evaluated, the same numbers have two names: the first is shown.
    unique: dict[tuple[object, ...], str] = {}
    for kind in names:
        numbers = [records[kind].numbers if kind in records else None for records in latest]
        unique.setdefault((kind.partition('/')[2] or kind, repr(numbers)), kind)
    return [(kind, list(metrics)) for kind, metrics in names.items() if kind in unique.values()]


def _row(groups: Sequence[Group], kind: str, name: str) -> Row:
    cells: list[Cell | None] = []
    for group in groups:
        records: list[Record] = [latest[kind] for run in group.runs if kind in (latest := run.latest())]
        values = [value for record in records if (value := task_metrics(record).get(name)) is not None]
        cells.append(cell(values) if values else None)
    means = [cell.mean for cell in cells if cell]
    if len(means) > 1:
        cells = [dataclasses.replace(cell, best=cell.mean == max(means)) if cell else None for cell in cells]
    return readable(kind), name, cells


def headline(overviews: Sequence[Overview], rows: Sequence[Row], groups: Sequence[Group]) -> list[str]:
    """Sentences that name the best of several runs, by the held-out loss and by the first metric of each evaluation.

    `rows` are those of `task_table` with the first metric of each evaluation.
    """
    sentences = []
    losses = sorted((one.held_out, one.name) for one in overviews if one.held_out is not None)
    if len(losses) > 1:
        (loss, name), (next_loss, next_name) = losses[:2]
        sentences.append(f'Lowest held-out loss: {name}, {loss:.4g}; next {next_name}, {next_loss:.4g}.')
        if len({one.step for one in overviews if one.held_out is not None}) > 1:
            sentences.append('The runs are at different steps.')
    for kind, metric, cells in rows:
        pairs = zip(cells, groups, strict=True)
        means = sorted(((cell.mean, group.name) for cell, group in pairs if cell), reverse=True)
        if len(means) > 1:
            (mean, name), (next_mean, next_name) = means[:2]
            word = 'Highest' if mean > next_mean else 'Equal'
            first, second = (f'{value:.2f}{unit(metric)}' for value in (mean, next_mean))
            sentences.append(f'{word} {metric} of {kind}: {name}, {first}; next {next_name}, {second}.')
    return sentences


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example with each run's prediction as (words, whether they differ from the target) in order, or None."""

    input: str
    target: str
    predictions: Sequence[Sequence[tuple[str, bool]] | None]


def samples(runs: Sequence[Run]) -> list[tuple[str, list[Sample], list[str]]]:
    """(task and split, examples, share of each run's predictions that equal the target) for every file of predictions.

    The first half of the examples are wrong predictions of the first run that has the file. All runs show the same
    examples.
    """
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.predictions):
        by_index = [
            {row.get('index', place): row for place, row in enumerate(run.predictions.get(name, ()))} for run in runs
        ]
        first = next(rows for rows in by_index if rows)
        wrong = [index for index, row in first.items() if not _is_right(row)]
        right = [index for index, row in first.items() if _is_right(row)]
        half = _SHOWN_PREDICTIONS // 2
        indices = wrong[: _SHOWN_PREDICTIONS - min(half, len(right))] + right[:half]
        counts = [
            f'{sum(map(_is_right, rows.values())):,} of {len(rows):,} equal the target' if rows else ''
            for rows in by_index
        ]
        tables.append((name, [_sample([rows.get(index) for rows in by_index]) for index in indices], counts))
    return tables


def _is_right(row: Mapping[str, Any]) -> bool:
    return str(row['prediction']).split() == str(row.get('target', '')).split()


def _sample(rows: Sequence[Mapping[str, Any] | None]) -> Sample:
    """One example, from its row of each run; None for a run without it."""
    first = next(row for row in rows if row is not None)
    target = str(first.get('target', ''))
    predictions = [
        None if row is None else compare_words(str(row.get('target', '')), str(row['prediction'])) for row in rows
    ]
    return Sample(_truncate(str(first.get('input', ''))), _truncate(target), predictions)


def compare_words(target: str, prediction: str) -> list[tuple[str, bool]]:
    """The prediction in parts of whole words, each with whether it differs from the target."""
    expected, words = (re.findall(r'\s+|\S+', _truncate(text)) for text in (target, prediction))
    parts = []
    for tag, _, _, first, last in difflib.SequenceMatcher(None, expected, words, autojunk=False).get_opcodes():
        if last > first:
            parts.append((''.join(words[first:last]), tag != 'equal'))
    return parts


def _truncate(text: str, length: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= length else text[:length] + ' …'


@dataclasses.dataclass(frozen=True)
class Confusion:
    """The predictions of one run for one task and split.

    Attributes:
        run, task: their names; the task's with the split.
        labels: the targets' texts, the most frequent first; the predictions' columns are the same and, if `has_other`,
            one for every other text.
        counts: [labels, columns], how many examples with this target have this prediction.
        has_other: whether a prediction differs from every target.
    """

    run: str
    task: str
    labels: Sequence[str]
    counts: Sequence[Sequence[int]]
    has_other: bool

    @property
    def totals(self) -> list[int]:
        """The number of examples with each target."""
        return [sum(row) for row in self.counts]

    @property
    def accuracy(self) -> float:
        """Percent of predictions that equal their targets."""
        return 100 * sum(row[index] for index, row in enumerate(self.counts)) / sum(self.totals)

    @property
    def majority(self) -> float:
        """Percent that the most frequent target would get as every answer."""
        return 100 * max(self.totals) / sum(self.totals)


def confusions(runs: Sequence[Run]) -> list[Confusion]:
    """A table for each run and file of predictions whose targets are labels: few different texts."""
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.predictions):
        for run in runs:
            # White space does not count, as everywhere in the report.
            pairs = [
                (' '.join(str(row.get('target', '')).split()), ' '.join(str(row['prediction']).split()))
                for row in run.predictions.get(name, ())
            ]
            targets = collections.Counter(target for target, _ in pairs)
            labels = [label for label, _ in targets.most_common(MOST_LABELS + 1)]
            if not 2 <= len(labels) <= min(MOST_LABELS, len(pairs) // 2):
                continue
            index = {label: place for place, label in enumerate(labels)}
            has_other = any(prediction not in index for _, prediction in pairs)
            counts = [[0] * (len(labels) + has_other) for _ in labels]
            for target, prediction in pairs:
                counts[index[target]][index.get(prediction, len(labels))] += 1
            shown = [_truncate(label, _LONGEST_LABEL) for label in labels]
            tables.append(Confusion(run.name, name, shown, counts, has_other))
    return tables
