"""Summarizes runs in numbers and sentences for reports, model cards and progress lines."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from remixer_t5x import ranges
from remixer_t5x.extras.reports.curves import Chart
from remixer_t5x.extras.reports.records import TRAIN, MetricsRecord, RecordedRun

# Metrics of evaluations on held-out text. All other metrics belong to a task.
LOSS_METRICS = ('loss', 'cross_ent_loss', 'constant_loss', 'perplexity', 'accuracy', 'z_loss', 'tokens')
# An evaluation with more metrics than this, such as COGS, has a separate table.
MAX_TABLE_METRICS = 6
MEMORY_TITLES = {'host_mib': 'host memory', 'device_mib': 'device memory', 'device_peak_mib': 'device memory, peak'}
# The summary warns if the last held-out loss exceeds the lowest one by more than this fraction.
_MAX_RELATIVE_RISE = 0.01


@dataclasses.dataclass(frozen=True)
class Overview:
    """A summary of a run. Numbers that were not recorded are None; `summary` describes the run in sentences."""

    name: str
    step: int
    steps: int | None
    train_loss: float | None
    held_out: float | None
    constant: float | None
    tokens_per_second: float | None
    seconds: float
    memory: Mapping[str, float]
    summary: str


def summarize_run(run: RecordedRun) -> Overview:
    """Summarizes a run."""
    losses, speeds = (
        run.metric_points(TRAIN, 'loss'),
        [value for _, value in run.metric_points(TRAIN, 'tokens_per_second')],
    )
    # Both losses are read from the first evaluation that reports them.
    held_out, constant = (
        next((points for kind in run.kinds() if (points := run.metric_points(kind, number))), [])
        for number in ('loss', 'constant_loss')
    )
    step = max((record.step for record in run.records), default=0)
    settings = run.settings()
    text = settings.get('TRAIN_STEPS', '')
    # In finetuning, TRAIN_STEPS refers to the macro TRAIN_STEPS_RELATIVE.
    steps = ranges.parse_whole_number(settings.get(text[1:], '') if text.startswith('%') else text)
    # The time of training steps excludes evaluations and interruptions.
    seconds, previous = 0.0, 0
    for logged_step, seconds_per_step in run.metric_points(TRAIN, 'seconds_per_step'):
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
    for kind, record in run.latest().items():
        for name, value in list(task_metrics(record).items())[:1]:
            sentences.append(f'{format_evaluation_name(kind)}: {name} {value:.4g}{unit(name)}.')
    if lost := sum(record.numbers.get('loss', 0.0) is None for record in run.records):
        sentences.append(f'Number of logged losses that are not finite: {lost}.')
    return Overview(
        name=run.name,
        step=step,
        steps=steps,
        train_loss=losses[-1][1] if losses else None,
        held_out=held_out[-1][1] if held_out else None,
        constant=constant[-1][1] if constant else None,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds=seconds,
        memory={
            name: max(value for _, value in series)
            for name in MEMORY_TITLES
            if (series := run.metric_points(TRAIN, name))
        },
        summary=' '.join(sentences),
    )


def format_evaluation_name(kind: str) -> str:
    """Formats 'eval/cogs' as 'cogs, eval'; returns names of held-out evaluations unchanged."""
    split, slash, task = kind.partition('/')
    return f'{task}, {split}' if slash else kind


def task_metrics(record: MetricsRecord) -> dict[str, float]:
    """Returns the metrics of a task, or {} for an evaluation of the held-out loss."""
    if 'loss' in record.numbers:
        return {}
    return {name: value for name, value in record.numbers.items() if value is not None}


def unit(metric: str) -> str:
    """Returns '%' for metrics in percent, such as accuracy, or '' for other metrics."""
    return '%' if metric.rpartition('_')[2] in ('accuracy', 'match', 'majority', 'f1', 'em') else ''


def build_charts(runs: Sequence[RecordedRun]) -> dict[str, list[Chart]]:
    """Returns the page's charts, keyed by the heading 'curves', 'optimization' or 'speed'."""

    def chart(title: str, unit: str, kind: str, number: str, smooth: bool = False) -> Chart:
        lines = {index: points for index, run in enumerate(runs) if (points := run.metric_points(kind, number))}
        return Chart(title, unit, lines, smooth)

    held_out, tasks = [], []
    for kind in dict.fromkeys(kind for run in runs for kind in run.kinds()):
        title = 'Held-out loss' + (f', {format_evaluation_name(kind)}' if kind != 'eval' else '')
        held_out.append(chart(title, 'nats per token', kind, 'loss'))
        of_kind = (record for run in runs for record in run.records if record.kind == kind)
        names = list(dict.fromkeys(name for record in of_kind for name in task_metrics(record)))
        tasks += [
            chart(f'{format_evaluation_name(kind)}: {name}', '', kind, name) for name in names[:MAX_TABLE_METRICS]
        ]
    by_heading = {
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
            *(chart(title.capitalize(), 'MiB', TRAIN, name) for name, title in MEMORY_TITLES.items()),
        ],
    }
    return {heading: [chart for chart in charts if chart.lines] for heading, charts in by_heading.items()}
