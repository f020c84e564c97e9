"""Compares our results with a paper's: the direction of each difference from the baseline, with its interval."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping

from remixer_t5x.evaluate.best import rank
from remixer_t5x.extras.reports.differences import compare_models
from remixer_t5x.extras.reproduce.tables import COUNTED, Column, Row, Table

REPRODUCED, CONTRADICTED, NOT_SHOWN, DIFFERENT = 'reproduced', 'contradicted', 'not shown', 'different'
# Relative tolerance for counts (parameters, FLOPs), because papers print only two or three digits.
COUNT_TOLERANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Finding:
    """One number of a table.

    Attributes:
        printed: the paper's number, None if it has none.
        ours: mean over seeds, None if no run has finished.
        deviation: standard deviation over seeds, None for fewer than two.
        printed_difference: the paper's difference from the baseline.
        difference: our mean difference over common seeds.
        margin: half of the 90% interval of `difference`; infinity for one seed.
        verdict: REPRODUCED, CONTRADICTED, NOT_SHOWN, DIFFERENT for a counted number, or '' without numbers to compare.
    """

    printed: float | None
    ours: float | None = None
    deviation: float | None = None
    printed_difference: float | None = None
    difference: float | None = None
    margin: float | None = None
    verdict: str = ''


def judge(
    table: Table, results: Mapping[tuple[str, str], Mapping[int, float]]
) -> Iterator[tuple[Column, Row, Finding]]:
    """Compares every cell of the table with the paper, and yields a finding for each.

    A difference is reproduced if it has the sign of the paper's and its interval excludes zero, contradicted if the
    interval excludes zero on the other side, and otherwise not shown. A counted number is reproduced if it is within
    COUNT_TOLERANCE of the paper's, and otherwise different.
    """
    for index, column in enumerate(table.columns):
        printed = {row.name: row.numbers[index] for row in table.rows}
        base = results.get((table.baseline, column.name), {})
        for row in table.rows:
            by_seed = results.get((row.name, column.name), {})
            finding = Finding(printed[row.name])
            if by_seed:
                values = list(by_seed.values())
                deviation = statistics.stdev(values) if len(values) > 1 else None
                finding = dataclasses.replace(finding, ours=statistics.fmean(values), deviation=deviation)
                if column.metric in COUNTED:
                    finding = dataclasses.replace(finding, verdict=_judge_count(finding.printed, finding.ours))
                elif row.name != table.baseline and base:
                    finding = _compare(finding, by_seed, base, printed[table.baseline], column.metric)
            yield column, row, finding


def _judge_count(printed: float | None, ours: float | None) -> str:
    if printed is None or ours is None:
        return ''
    return REPRODUCED if abs(ours / printed - 1) <= COUNT_TOLERANCE else DIFFERENT


def _compare(
    finding: Finding, ours: Mapping[int, float], base: Mapping[int, float], printed_base: float | None, metric: str
) -> Finding:
    higher_is_better = rank(metric, 1.0) > 0
    pairs = compare_models({'ours': ours, 'baseline': base}, higher_is_better)
    if not pairs:
        return finding
    (pair,) = pairs
    # `pair.gain` is the improvement of the better model, at least 0.
    sign = 1 if (pair.model == 'ours') == higher_is_better else -1
    printed_difference = None
    if finding.printed is not None and printed_base is not None:
        printed_difference = finding.printed - printed_base
    verdict = ''
    if printed_difference:
        agrees = printed_difference * sign > 0
        verdict = NOT_SHOWN if not pair.is_shown else REPRODUCED if agrees else CONTRADICTED
    return dataclasses.replace(
        finding,
        printed_difference=printed_difference,
        difference=sign * pair.gain,
        margin=pair.high - pair.gain,
        verdict=verdict,
    )
