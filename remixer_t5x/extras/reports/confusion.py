"""Which label is taken for which: a table of targets by predictions, where targets are few different texts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from remixer_t5x.extras.reports.records import Run

# With more different targets than this, or as many as half of the examples, targets are answers and not labels.
MOST_LABELS = 12
_LONGEST = 40


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
    def total(self) -> int:
        return sum(map(sum, self.counts))

    @property
    def accuracy(self) -> float:
        """Percent of predictions that equal their targets."""
        return 100 * sum(row[index] for index, row in enumerate(self.counts)) / self.total

    @property
    def majority(self) -> float:
        """Percent that the most frequent target would get as every answer."""
        return 100 * max(map(sum, self.counts)) / self.total

    @property
    def rows(self) -> list[tuple[str, int, list[tuple[int, float, bool]]]]:
        """(label, number of targets, (count, share of the row, whether it is right) of each column)."""
        sums = [sum(row) for row in self.counts]
        return [
            (label, total, [(count, count / total, place == column) for column, count in enumerate(row)])
            for place, (label, row, total) in enumerate(zip(self.labels, self.counts, sums, strict=True))
        ]


def confusions(runs: Sequence[Run]) -> list[Confusion]:
    """A table for each run and file of predictions whose targets are labels."""
    names = dict.fromkeys(name for run in runs for name in run.predictions)
    found = [_confusion(run, name) for name in names for run in runs if run.predictions.get(name)]
    return [one for one in found if one is not None]


def _confusion(run: Run, name: str) -> Confusion | None:
    pairs = [(_plain(row.get('target', '')), _plain(row['prediction'])) for row in run.predictions[name]]
    labels = [label for label, _ in collections.Counter(target for target, _ in pairs).most_common(MOST_LABELS + 1)]
    if not 2 <= len(labels) <= min(MOST_LABELS, len(pairs) // 2):
        return None
    known = {label: index for index, label in enumerate(labels)}
    has_other = any(prediction not in known for _, prediction in pairs)
    counts = [[0] * (len(labels) + has_other) for _ in labels]
    for target, prediction in pairs:
        counts[known[target]][known.get(prediction, len(labels))] += 1
    return Confusion(run.name, name, [_cut(label) for label in labels], counts, has_other)


def _plain(text: Any) -> str:
    """White space does not count, as everywhere in the report."""
    return ' '.join(str(text).split())


def _cut(label: str) -> str:
    return label if len(label) <= _LONGEST else label[:_LONGEST] + ' …'
