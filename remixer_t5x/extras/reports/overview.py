"""Summarizes runs in numbers, sentences and tables for reports, model cards and progress lines.

The tables contain task metrics over seeds, and sample predictions.
"""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from remixer_t5x.evaluate.checkpoint_ranking import AVERAGE_TASK, compute_signed_score
from remixer_t5x.extras.reports.differences import ComparedMeasure, ValueBySeed, compare_models, describe_differences
from remixer_t5x.extras.reports.run_records import TRAIN, MetricsRecord, RecordedRun, RunGroup

# An evaluation with more metrics than this, such as COGS, has a separate table.
MAX_TABLE_METRICS = 6
# The summary warns if the last held-out loss exceeds the lowest one by more than this fraction.
_MAX_RELATIVE_RISE = 0.01
HELD_OUT = 'held-out loss'
_SHOWN_PREDICTIONS = 10
_LONGEST_TEXT = 600


@dataclasses.dataclass(frozen=True)
class RunOverview:
    """A summary of a run. Numbers that were not recorded are None; `summary` describes the run in sentences."""

    name: str
    step: int
    steps: int | None
    train_loss: float | None
    held_out: float | None
    constant_loss: float | None
    tokens_per_second: float | None
    seconds: float
    summary: str


def summarize_run(run: RecordedRun) -> RunOverview:
    losses = run.select_metric_points(TRAIN, 'loss')
    speeds = [value for _, value in run.select_metric_points(TRAIN, 'tokens_per_second')]

    def find_first_points(number: str) -> tuple[str, Sequence[tuple[int, float]]]:
        """Returns the name of the first evaluation that reports `number`, and its points."""
        for kind in run.list_evaluation_names():
            if points := run.select_metric_points(kind, number):
                return kind, points
        return '', []

    (held_out_kind, held_out), (_, constant) = map(find_first_points, ('loss', 'constant_loss'))
    if held_out and any(
        record.step > held_out[-1][0] and record.numbers.get('loss', 0.0) is None
        for record in run.records
        if record.kind == held_out_kind
    ):
        # If the last held-out loss is not finite, the run has no result, even if earlier held-out losses are finite.
        held_out = []
    step = max((record.step for record in run.records), default=0)
    steps = run.find_whole_number('TRAIN_STEPS')
    # The time of training steps excludes evaluations and interruptions.
    seconds, previous = 0.0, 0
    for logged_step, seconds_per_step in run.select_metric_points(TRAIN, 'seconds_per_step'):
        seconds += seconds_per_step * (logged_step - previous)
        previous = logged_step

    sentences = [f'At step {step:,}.' if steps is None else f'Finished all {steps:,} steps.']
    if steps is not None and step < steps:
        sentences = [f'At step {step:,} of {steps:,}: stopped early, or still running.']
    if len(losses) > 1:
        verb = 'fell' if losses[-1][1] < losses[0][1] else 'rose'
        sentences.append(f'Training loss {verb} from {losses[0][1]:.4g} to {losses[-1][1]:.4g}.')
    if held_out:
        last, (best_step, best) = held_out[-1][1], min(held_out, key=lambda point: point[1])
        rise = last / best - 1 if best > 0 and last > best * (1 + _MAX_RELATIVE_RISE) else 0
        warning = f', {rise:.0%} above its lowest, {best:.4g} at step {best_step:,}' if rise else ''
        sentences.append(f'Held-out loss is {last:.4g}{warning}.')
    if constant:
        sentences.append(
            f'Always predicting the frequencies of the evaluated tokens has a loss of {constant[-1][1]:.4g}; '
            'a model with a lower loss uses its context.'
        )
    for kind, record in run.find_latest_evaluations().items():
        for name, value in list(select_task_metrics(record).items())[:1]:
            sentences.append(f'{format_evaluation_name(kind)}: {name} {value:.4g}.')
    if lost := sum(record.numbers.get('loss', 0.0) is None for record in run.records):
        sentences.append(f'Number of logged losses that are not finite: {lost}.')
    return RunOverview(
        name=run.name,
        step=step,
        steps=steps,
        train_loss=losses[-1][1] if losses else None,
        held_out=held_out[-1][1] if held_out else None,
        constant_loss=constant[-1][1] if constant else None,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds,
        summary=' '.join(sentences),
    )


def format_evaluation_name(kind: str) -> str:
    """Formats 'eval/cogs' as 'cogs, eval'; returns names of held-out evaluations unchanged."""
    split, slash, task = kind.partition('/')
    return f'{"all tasks" if task == AVERAGE_TASK else task}, {split}' if slash else kind


def select_task_metrics(record: MetricsRecord) -> dict[str, float]:
    """Returns the metrics of a task, or {} for an evaluation of the held-out loss."""
    if 'loss' in record.numbers:
        return {}
    return {name: value for name, value in record.numbers.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class TableCell:
    """A metric of a group of runs; `best` marks a group that is significantly better than every other group."""

    by_seed: ValueBySeed
    best: bool = False

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed.values())

    @property
    def standard_deviation(self) -> float | None:
        """Sample standard deviation (n - 1); None for one seed."""
        return statistics.stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None


class MetricRow(NamedTuple):
    """A table row: the names of the evaluation and the metric, and a cell for each group of runs."""

    kind: str
    metric: str
    cells: list[TableCell | None]
    higher_is_better: bool


def build_task_table(groups: Sequence[RunGroup]) -> list[MetricRow]:
    """Builds a table of the newest value of each metric, and marks groups that are significantly better than all
    others. For evaluations with many metrics, the table contains only the first metric; see `build_breakdown_tables`.
    """
    return [
        _build_metric_row(groups, kind, name)
        for kind, names in _list_metrics(groups)
        for name in (names[:1] if len(names) > MAX_TABLE_METRICS else names)
    ]


def build_breakdown_tables(groups: Sequence[RunGroup]) -> list[tuple[str, list[MetricRow]]]:
    """Builds, for each evaluation with many metrics (such as COGS by type), a table of all metrics."""
    return [
        (format_evaluation_name(kind), [_build_metric_row(groups, kind, name) for name in names])
        for kind, names in _list_metrics(groups)
        if len(names) > MAX_TABLE_METRICS
    ]


def _list_metrics(groups: Sequence[RunGroup]) -> list[tuple[str, list[str]]]:
    """Returns all evaluations and the names of their metrics, in order of first appearance in the runs."""
    latest = [run.find_latest_evaluations() for group in groups for run in group.runs]
    names: dict[str, dict[str, None]] = {}
    for kind, record in (item for records in latest for item in records.items()):
        names.setdefault(kind, {}).update(dict.fromkeys(select_task_metrics(record)))
    # If `remixer-t5x eval` uses the same split as the run, identical results have two names; only the first is shown.
    run_splits = {'eval', *(str(run.evaluated_split) for group in groups for run in group.runs)}
    unique: dict[tuple[object, ...], str] = {}
    for kind in names:
        numbers = [records[kind].numbers if kind in records else None for records in latest]
        split, _, task = kind.partition('/')
        unique.setdefault((task if split in run_splits else kind, repr(numbers)), kind)
    return [(kind, list(metrics)) for kind, metrics in names.items() if kind in unique.values()]


def _build_metric_row(groups: Sequence[RunGroup], kind: str, metric: str) -> MetricRow:
    cells: dict[str, TableCell] = {}
    for group in groups:
        by_seed = {
            run.seed: value
            for run in group.runs
            if kind in (latest := run.find_latest_evaluations())
            and (value := select_task_metrics(latest[kind]).get(metric)) is not None
        }
        if by_seed:
            cells[group.name] = TableCell(by_seed)
    # BEST_METRICS may state that lower is better, as in {'cogs_v001': '-distance'}.
    ranking = groups[0].runs[0].best_metrics
    negated = f'-{metric}'
    is_negated = isinstance(ranking, dict) and ranking.get(kind.partition('/')[2]) == negated
    higher_is_better = compute_signed_score(negated if is_negated else metric, 1.0) > 0
    pairs = compare_models({name: cell.by_seed for name, cell in cells.items()}, higher_is_better)
    wins = collections.Counter(pair.model for pair in pairs if pair.is_significant)
    for name in cells:
        if 0 < wins[name] == len(cells) - 1:
            cells[name] = dataclasses.replace(cells[name], best=True)
    return MetricRow(
        format_evaluation_name(kind), metric, [cells.get(group.name) for group in groups], higher_is_better
    )


def collect_compared_measures(
    groups: Sequence[RunGroup], rows: Sequence[MetricRow], overviews: Mapping[str, RunOverview]
) -> list[ComparedMeasure]:
    """Collects the held-out loss and the main metric of each evaluation in `rows`, if any group has a value."""
    losses: dict[str, ValueBySeed] = {
        group.name: {run.seed: loss for run in group.runs if (loss := overviews[run.name].held_out) is not None}
        for group in groups
    }
    measures = [ComparedMeasure(HELD_OUT, {name: by_seed for name, by_seed in losses.items() if by_seed}, False)]
    main_rows: dict[str, MetricRow] = {}
    for row in rows:
        # The main metric of an evaluation is in its first row.
        main_rows.setdefault(row.kind, row)
    for row in main_rows.values():
        values = {group.name: cell.by_seed for group, cell in zip(groups, row.cells, strict=True) if cell}
        measures.append(ComparedMeasure(f'{row.metric} of {row.kind}', values, row.higher_is_better))
    return [measure for measure in measures if measure.models]


def describe_measure_differences(
    measures: Sequence[ComparedMeasure], overviews: Mapping[str, RunOverview]
) -> list[str]:
    """Returns sentences about the differences between groups in each measure."""
    sentences = list(filter(None, map(describe_differences, measures)))
    if sentences and len({overview.step for overview in overviews.values()}) > 1:
        sentences.append('The runs are at different steps.')
    return sentences


class PredictionSample(NamedTuple):
    """An evaluation example, and the prediction of each run that has the example by the name of the run."""

    input: str
    target: str
    predictions: Mapping[str, str]


def select_prediction_samples(
    runs: Sequence[RecordedRun],
) -> list[tuple[str, list[PredictionSample], dict[str, str]]]:
    """Returns (task and split, selected examples, accuracy string by run) for each prediction file.

    Examples that the first run predicts incorrectly come first.
    """
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.predictions):
        by_index = {
            run.name: {row.get('index', position): row for position, row in enumerate(run.predictions[name])}
            for run in runs
            if name in run.predictions
        }
        first = next(iter(by_index.values()))
        indices = sorted(first, key=lambda index: _equals_target(first[index]))[:_SHOWN_PREDICTIONS]
        counts = {
            run: f'{sum(map(_equals_target, rows.values())):,} of {len(rows):,} equal the target'
            for run, rows in by_index.items()
        }
        samples = [
            PredictionSample(
                _truncate_text(first[index].get('input', '')),
                _truncate_text(first[index].get('target', '')),
                {run: _truncate_text(rows[index]['prediction']) for run, rows in by_index.items() if index in rows},
            )
            for index in indices
        ]
        tables.append((name, samples, counts))
    return tables


def _equals_target(row: Mapping[str, Any]) -> bool:
    return str(row['prediction']).split() == str(row.get('target', '')).split()


def _truncate_text(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + ' …'
