"""Compares our differences from the baseline with the published differences, by sign and confidence interval."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping

from remixer_t5x.evaluate.best import signed_score
from remixer_t5x.extras.reports.differences import compare_models
from remixer_t5x.extras.reproduce.tables import COUNTED_METRICS, PaperTable, TableColumn, TableRow

REPRODUCED, CONTRADICTED, NOT_SHOWN, DIFFERENT = 'reproduced', 'contradicted', 'not shown', 'different'
# Relative tolerance for counts (parameters, FLOPs), because papers report only two or three digits.
COUNT_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class ComparedNumber:
    """The comparison of a published number with our result.

    Attributes:
        published: the published number, or None.
        ours: mean of our results over seeds, or None if no run has finished.
        deviation: standard deviation of our results over seeds, or None for fewer than two seeds.
        published_difference: published difference from the baseline.
        difference: our mean difference from the baseline, over the seeds that both models have.
        margin: half-width of the 90% confidence interval of `difference`; infinity for one seed.
        verdict: REPRODUCED, CONTRADICTED, NOT_SHOWN, DIFFERENT (only for parameters and FLOPs), or '' if a number is
            missing.
    """

    published: float | None
    ours: float | None = None
    deviation: float | None = None
    published_difference: float | None = None
    difference: float | None = None
    margin: float | None = None
    verdict: str = ''


def compare_with_paper(
    table: PaperTable, results: Mapping[tuple[str, str], Mapping[int, float]]
) -> Iterator[tuple[TableColumn, TableRow, ComparedNumber]]:
    """Compares every number of the table with the paper, and yields (column, row, comparison).

    If the confidence interval of our difference excludes zero, the published difference is reproduced if both have the
    same sign, and contradicted otherwise. If the interval includes zero, the difference is not shown. A counted number
    is reproduced if it is within COUNT_TOLERANCE of the published number, and otherwise different.
    """
    for index, column in enumerate(table.columns):
        published = {row.name: row.numbers[index] for row in table.rows}
        base = results.get((table.baseline, column.name), {})
        for row in table.rows:
            by_seed = results.get((row.name, column.name), {})
            finding = ComparedNumber(published[row.name])
            if by_seed:
                values = list(by_seed.values())
                deviation = statistics.stdev(values) if len(values) > 1 else None
                finding = dataclasses.replace(finding, ours=statistics.fmean(values), deviation=deviation)
                if column.metric in COUNTED_METRICS:
                    if finding.published is not None:
                        is_close = abs(values[0] / finding.published - 1) <= COUNT_TOLERANCE
                        finding = dataclasses.replace(finding, verdict=REPRODUCED if is_close else DIFFERENT)
                elif row.name != table.baseline and base:
                    finding = _compare_with_baseline(finding, by_seed, base, published[table.baseline], column.metric)
            yield column, row, finding


def _compare_with_baseline(
    finding: ComparedNumber,
    ours: Mapping[int, float],
    base: Mapping[int, float],
    published_base: float | None,
    metric: str,
) -> ComparedNumber:
    higher_is_better = signed_score(metric, 1.0) > 0
    pairs = compare_models({'ours': ours, 'baseline': base}, higher_is_better)
    if not pairs:
        return finding
    (pair,) = pairs
    # `pair.gain` is the non-negative improvement of the better model.
    sign = 1 if (pair.model == 'ours') == higher_is_better else -1
    published_difference = None
    if finding.published is not None and published_base is not None:
        published_difference = finding.published - published_base
    verdict = ''
    if published_difference:
        agrees = published_difference * sign > 0
        verdict = NOT_SHOWN if not pair.is_shown else REPRODUCED if agrees else CONTRADICTED
    return dataclasses.replace(
        finding,
        published_difference=published_difference,
        difference=sign * pair.gain,
        margin=pair.high - pair.gain,
        verdict=verdict,
    )
