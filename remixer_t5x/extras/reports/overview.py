"""The summary and the tables of a report."""

from __future__ import annotations

import dataclasses
import difflib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x import ranges
from remixer_t5x.extras.reports.charts import Chart, Series
from remixer_t5x.extras.reports.records import TRAIN, Group, Record, Run

# Numbers of every evaluation on held-out text, which are not metrics of a task.
OF_LOSS = ('loss', 'cross_ent_loss', 'constant_loss', 'perplexity', 'accuracy', 'z_loss', 'tokens')
# An evaluation with more metrics than this, such as COGS, is broken down by type.
MOST_METRICS = 6
MEMORY = {'host_mib': 'host memory', 'device_mib': 'device memory', 'device_peak_mib': 'device memory, peak'}
# The summary warns about the held-out loss if the last one exceeds the lowest by more than this share.
RISEN = 0.01
_SHOWN_PREDICTIONS = 10
_LONGEST_TEXT = 600


@dataclasses.dataclass(frozen=True)
class Overview:
    """One run in numbers; None for numbers that were not recorded."""

    name: str
    folder: str
    step: int
    steps: int | None
    train_loss: float | None
    held_out: float | None
    constant: float | None
    best_held_out: tuple[int, float] | None
    tokens_per_second: float | None
    seconds: float
    memory: Mapping[str, float]
    said: str


def overview(run: Run) -> Overview:
    """The numbers of one run, and a few sentences about how it went."""
    losses, held_out = run.series(TRAIN, 'loss'), held_out_losses(run)
    best = min(held_out, key=lambda point: point[1]) if held_out else None
    speeds = [value for _, value in run.series(TRAIN, 'tokens_per_second')]
    memory = {name: max(value for _, value in series) for name in MEMORY if (series := run.series(TRAIN, name))}
    step = max((record.step for record in run.records), default=0)
    settings = run.settings()
    wanted = settings.get('TRAIN_STEPS', '')
    # Finetuning names its steps TRAIN_STEPS_RELATIVE.
    wanted = settings.get(wanted[1:], '') if wanted.startswith('%') else wanted
    steps = ranges.whole_number(wanted)
    constant = _constant(run)
    return Overview(
        run.name, run.folder, step, steps, losses[-1][1] if losses else None, held_out[-1][1] if held_out else None,
        constant, best, statistics.median(speeds) if speeds else None, _seconds(run), memory, _said(run, step, steps),
    )  # fmt: skip


def headline(
    overviews: Sequence[Overview], tasks: Sequence[tuple[str, str, list[Cell | None]]], groups: Sequence[Group]
) -> list[str]:
    """Which of several runs is ahead, and by how much: a sentence for the held-out loss and for each first metric.

    `tasks` are the rows of `task_table` with the first metric of each evaluation.
    """
    said = []
    ranked = sorted((one.held_out, one.name) for one in overviews if one.held_out is not None)
    if len(ranked) > 1:
        (loss, name), (next_loss, next_name) = ranked[:2]
        said.append(f'Lowest held-out loss: {name}, {_round(loss)}; next {next_name}, {_round(next_loss)}.')
        if len({one.step for one in overviews if one.held_out is not None}) > 1:
            said.append('The runs are at different steps.')
    for kind, metric, cells in tasks:
        means = sorted(((one.mean, group.name) for one, group in zip(cells, groups, strict=True) if one), reverse=True)
        if len(means) > 1:
            (mean, name), (next_mean, next_name) = means[:2]
            word = 'Highest' if mean > next_mean else 'Equal'
            first, second = (f'{value:.2f}{unit(metric)}' for value in (mean, next_mean))
            said.append(f'{word} {metric} of {kind}: {name}, {first}; next {next_name}, {second}.')
    return said


def held_out_losses(run: Run) -> list[tuple[int, float]]:
    """The loss of the first evaluation that has one, over steps."""
    return next((points for kind in run.kinds() if (points := run.series(kind, 'loss'))), [])


def _constant(run: Run) -> float | None:
    """The loss of the best constant answer in the first evaluation of the loss."""
    points = next((points for kind in run.kinds() if (points := run.series(kind, 'constant_loss'))), None)
    return points[-1][1] if points else None


def _seconds(run: Run) -> float:
    """Time spent in training steps, without evaluations and the time between interruptions."""
    total, before = 0.0, 0
    for step, seconds in run.series(TRAIN, 'seconds_per_step'):
        total += seconds * (step - before)
        before = step
    return total


def _said(run: Run, step: int, steps: int | None) -> str:
    if steps is None:
        parts = [f'At step {step:,}.']
    elif step >= steps:
        parts = [f'Finished all {steps:,} steps.']
    else:
        parts = [f'At step {step:,} of {steps:,}: stopped early, or still running.']
    losses, held_out = run.series(TRAIN, 'loss'), held_out_losses(run)
    if len(losses) > 1:
        word = 'fell' if losses[-1][1] < losses[0][1] else 'rose'
        parts.append(f'Training loss {word} from {_round(losses[0][1])} to {_round(losses[-1][1])}.')
    if held_out:
        at, best = min(held_out, key=lambda point: point[1])
        parts.append(f'Held-out loss is {_round(held_out[-1][1])}' + (
            f', {held_out[-1][1] / best - 1:.0%} above its lowest, {_round(best)} at step {at:,}.'
            if held_out[-1][1] > best * (1 + RISEN) else '.'))  # fmt: skip
    constant = _constant(run)
    if constant is not None:
        parts.append(f'The best constant answer has {_round(constant)}; a model below it uses its context.')
    for kind, record in run.latest().items():
        metrics = task_metrics(record)
        if metrics:
            name, value = next(iter(metrics.items()))
            parts.append(f'{readable(kind)}: {name} {_round(value)}{unit(name)}.')
    lost = sum(record.numbers.get('loss', 0.0) is None for record in run.records)
    if lost:
        parts.append(f'{lost} logged losses were not finite.')
    return ' '.join(parts)


def _round(value: float) -> str:
    return f'{value:.4g}'


def readable(kind: str) -> str:
    """'eval/cogs' as 'cogs, eval'; the name of a held-out evaluation stays as it is."""
    split, slash, task = kind.partition('/')
    return f'{task}, {split}' if slash else kind


def task_metrics(record: Record) -> dict[str, float]:
    """The metrics of a task; empty for an evaluation of the loss."""
    if 'loss' in record.numbers:
        return {}
    return {name: value for name, value in record.numbers.items() if value is not None}


def unit(metric: str) -> str:
    """'%' for metrics that are shares in hundredths, such as accuracy; empty for others."""
    return '%' if metric.rpartition('_')[2] in ('accuracy', 'match', 'majority', 'f1', 'em') else ''


@dataclasses.dataclass(frozen=True)
class Cell:
    """The mean over the runs of a group, its standard deviation (None for one run), and the number of runs."""

    mean: float
    deviation: float | None
    count: int
    best: bool = False


def cell(values: Sequence[float]) -> Cell:
    """The cell of one metric over seeds, with the sample standard deviation (n - 1)."""
    return Cell(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def task_table(groups: Sequence[Group]) -> list[tuple[str, str, list[Cell | None]]]:
    """(evaluation, metric, a cell for each group) with the newest values; the highest mean of a row is marked.

    `breakdowns` has the metrics that are broken down by type.
    """
    latest = [[run.latest() for run in group.runs] for group in groups]
    rows = []
    for kind, names in _metrics_of(latest):
        kept = names[:1] if len(names) > MOST_METRICS else names
        rows += [(readable(kind), name, _cells(latest, kind, name)) for name in kept]
    return rows


def _metrics_of(latest: Sequence[Sequence[Mapping[str, Record]]]) -> list[tuple[str, list[str]]]:
    """Every evaluation of any run, and the names of its metrics in all runs, in order of first appearance."""
    found: dict[str, dict[str, None]] = {}
    for kind, record in (item for group in latest for run in group for item in run.items()):
        found.setdefault(kind, {}).update(dict.fromkeys(task_metrics(record)))
    # The split that training evaluates has two names if `eval` evaluates it once more: its numbers are shown once.
    unique: dict[tuple[object, ...], str] = {}
    for kind in found:
        numbers = [run[kind].numbers if kind in run else None for group in latest for run in group]
        unique.setdefault((kind.partition('/')[2] or kind, repr(numbers)), kind)
    return [(kind, list(names)) for kind, names in found.items() if kind in unique.values()]


def _cells(latest: Sequence[Sequence[Mapping[str, Record]]], kind: str, name: str) -> list[Cell | None]:
    cells: list[Cell | None] = []
    for group in latest:
        values = [value for run in group if kind in run and (value := task_metrics(run[kind]).get(name)) is not None]
        cells.append(cell(values) if values else None)
    found = [one.mean for one in cells if one]
    if len(found) < 2:
        return cells
    return [dataclasses.replace(one, best=one.mean == max(found)) if one else None for one in cells]


def breakdowns(groups: Sequence[Group]) -> list[tuple[str, list[tuple[str, list[Cell | None]]]]]:
    """(evaluation, (metric, a cell for each group)) for evaluations with many metrics, such as COGS by type."""
    latest = [[run.latest() for run in group.runs] for group in groups]
    found = []
    for kind, names in _metrics_of(latest):
        if len(names) > MOST_METRICS:
            found.append((readable(kind), [(name, _cells(latest, kind, name)) for name in names]))
    return found


def charts(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """The curves of the page by heading: 'curves', 'optimization', and 'speed'."""

    def chart(title: str, unit: str, kind: str, number: str, smooth: bool = False) -> Chart:
        lines = [Series(index, run.series(kind, number)) for index, run in enumerate(runs)]
        return Chart(title, unit, [line for line in lines if line.points], smooth)

    kinds = dict.fromkeys(kind for run in runs for kind in run.kinds())
    held_out = [
        chart('Held-out loss' + (f', {readable(kind)}' if kind != 'eval' else ''), 'nats per token', kind, 'loss')
        for kind in kinds
    ]
    tasks = []
    for kind in kinds:
        names = dict.fromkeys(
            name for run in runs for record in run.records if record.kind == kind for name in task_metrics(record)
        )
        tasks += [chart(f'{readable(kind)}: {name}', '', kind, name) for name in list(names)[:MOST_METRICS]]
    found = {
        'curves': [
            chart('Training loss', 'nats per token', TRAIN, 'loss', smooth=True),
            *held_out,
            *tasks,
            chart('Training accuracy', 'share of tokens', TRAIN, 'accuracy', smooth=True),
        ],
        'optimization': [
            chart('Learning rate', '', TRAIN, 'learning_rate'),
            chart('Norm of the gradient', '', TRAIN, 'grad_norm', smooth=True),
            chart('Norm of the parameters', '', TRAIN, 'param_norm'),
        ],
        'speed': [
            chart('Tokens', 'per second', TRAIN, 'tokens_per_second', smooth=True),
            chart('Model FLOPs utilisation', 'share of the peak', TRAIN, 'mfu', smooth=True),
            chart('Waiting for data', 'seconds between logs', TRAIN, 'data_wait_seconds'),
            *(chart(title.capitalize(), 'MiB', TRAIN, name) for name, title in MEMORY.items()),
        ],
    }
    return {name: [one for one in those if one.lines] for name, those in found.items()}


@dataclasses.dataclass(frozen=True)
class Sample:
    """One example with each run's prediction as (words, whether they differ from the target) in order, or None."""

    input: str
    target: str
    made: Sequence[Sequence[tuple[str, bool]] | None]
    right: Sequence[bool]


def samples(runs: Sequence[Run]) -> list[tuple[str, list[Sample], list[str]]]:
    """(task and split, examples, share of each run's predictions that equal the target) for every file of predictions.

    The first half of the examples are wrong predictions of the first run that has the file. All runs show the same
    examples.
    """
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.predictions):
        each = [
            {row.get('index', place): row for place, row in enumerate(run.predictions.get(name, ()))} for run in runs
        ]
        first = next(rows for rows in each if rows)
        wrong = [index for index, row in first.items() if not _is_right(row)]
        right = [index for index, row in first.items() if _is_right(row)]
        half = _SHOWN_PREDICTIONS // 2
        indices = wrong[: _SHOWN_PREDICTIONS - min(half, len(right))] + right[:half]
        counts = [
            f'{sum(map(_is_right, rows.values())):,} of {len(rows):,} equal the target' if rows else '' for rows in each
        ]
        found.append((name, [_sample(index, each) for index in indices], counts))
    return found


def _target(row: Mapping[str, Any]) -> str:
    target = row.get('target', '')
    return target if isinstance(target, str) else str(target)


def _is_right(row: Mapping[str, Any]) -> bool:
    return str(row['prediction']).split() == _target(row).split()


def _sample(index: Any, each: Sequence[Mapping[Any, Mapping[str, Any]]]) -> Sample:
    one = next(rows[index] for rows in each if index in rows)
    made = [compared(_target(rows[index]), str(rows[index]['prediction'])) if index in rows else None for rows in each]
    right = [index in rows and _is_right(rows[index]) for rows in each]
    return Sample(_cut(str(one.get('input', ''))), _cut(_target(one)), made, right)


def compared(target: str, prediction: str) -> list[tuple[str, bool]]:
    """The prediction in parts of whole words, each with whether it differs from the target."""
    wanted, made = (re.findall(r'\s+|\S+', _cut(text)) for text in (target, prediction))
    parts = []
    for what, _, _, first, last in difflib.SequenceMatcher(None, wanted, made, autojunk=False).get_opcodes():
        if last > first:
            parts.append((''.join(made[first:last]), what != 'equal'))
    return parts


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + ' …'
