"""Plans the runs of a table, counts their costs, and reads their results.

Also compares our differences from the baseline with the published differences, by sign and confidence interval.
"""

import argparse
import dataclasses
import pathlib
import re
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from remixer_t5x.config import reference_resolver
from remixer_t5x.errors import UserError
from remixer_t5x.extras.reports import cost_matching, run_records
from remixer_t5x.extras.reports.differences import t_interval
from remixer_t5x.extras.reports.sweep import SweepCell
from remixer_t5x.extras.reproduce.tables import (
    COUNTED_METRICS,
    PARAMETERS,
    PaperTable,
    TableColumn,
    TableRow,
    TrainingStage,
)

# Fraction of the device's peak matrix-multiplication rate that a run is assumed to reach.
UTILIZATION = 0.3
REPRODUCED, CONTRADICTED, NOT_SHOWN, DIFFERENT = 'reproduced', 'contradicted', 'not shown', 'different'
# Relative tolerance for counts (parameters, FLOPs), because papers report only two or three digits.
COUNT_TOLERANCE = 0.05


def plan_runs(
    table: PaperTable, args: argparse.Namespace, seeds: Sequence[int], folder: pathlib.Path
) -> dict[tuple[str, str, int], SweepCell]:
    """Returns a dict from (stage, row, seed) to the run, in training order: by stage, and then by seed."""
    cells: dict[tuple[str, str, int], SweepCell] = {}
    for stage in table.stages:
        for seed in seeds:
            for row in table.rows:
                name = re.sub(r'\W+', '_', row.name).strip('_')
                run_folder = folder / stage.name / name / f'seed_{seed}'
                files, settings = _collect_gin_sources(stage, row, args)
                flags = {**settings, 'SEED': seed, 'MODEL_DIR': run_folder}
                if stage.previous_stage:
                    flags['INITIAL_CHECKPOINT_PATH'] = cells[stage.previous_stage, row.name, seed].folder
                command = (
                    stage.command,
                    *cost_matching.build_config_flags(args, files),
                    f'--model={row.model}',
                    *(f'--gin.{flag}={value}' for flag, value in flags.items()),
                )
                label = f'{row.name}, {stage.name}'
                cells[stage.name, row.name, seed] = SweepCell(label, (), seed, run_folder, command)
    return cells


def _collect_gin_sources(
    stage: TrainingStage, row: TableRow, args: argparse.Namespace
) -> tuple[list[str], dict[str, object]]:
    """Returns the gin files and the settings of a run."""
    return [*stage.files, *row.files, *args.gin_file], {**stage.flags, **row.flags, **dict(args.gin_flags)}


@dataclasses.dataclass(frozen=True)
class RunCost:
    """The cost of a run. `example_flops` counts the forward pass for one example; `flops` counts all training steps."""

    parameters: int
    example_flops: float
    steps: int
    flops: float


# Maps (stage, row) to the cost of the run.
Costs = Mapping[tuple[str, str], RunCost]


def compute_run_cost(stage: TrainingStage, row: TableRow, args: argparse.Namespace) -> RunCost:
    """Loads the configuration of a run, and counts its cost from array shapes. Raises UserError if it is invalid."""
    files, settings = _collect_gin_sources(stage, row, args)
    # Finetuning requires a checkpoint, which may not exist yet.
    initial = [('INITIAL_CHECKPOINT_PATH', 'checkpoint')] if stage.previous_stage else []
    flags = [*initial, *((name, str(value)) for name, value in settings.items())]
    sources = argparse.Namespace(**{**vars(args), 'gin_file': files, 'gin_flags': flags})
    counted = cost_matching.count_cost(sources, f'{row.name}, {stage.name}', row.model, ())
    batch_size, steps = map(reference_resolver.evaluate_macro, ('BATCH_SIZE', 'TRAIN_STEPS'))
    flops = counted.training_flops * batch_size * steps
    return RunCost(counted.total_parameters, counted.total_forward_flops, steps, flops)


def compute_counted_results(table: PaperTable, costs: Costs) -> dict[tuple[str, str], dict[int, float]]:
    """Computes the columns that require no training, as {(row, column): {seed: value}} with 0 as the only seed."""
    results = {}
    for column in table.columns:
        base = costs[column.stage.name, table.baseline]
        for row in table.rows if column.metric in COUNTED_METRICS else ():
            cost = costs[column.stage.name, row.name]
            value = cost.parameters / 1e6 if column.metric == PARAMETERS else cost.example_flops / base.example_flops
            results[row.name, column.name] = {0: value}
    return results


def measure_matmul_flops_per_second() -> float:
    """Measures the best FLOP/s of a [4096, 1024] x [1024, 1024] float32 matmul on the local device."""
    a, b = jnp.ones((4096, 1024)), jnp.ones((1024, 1024))
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(a, b).block_until_ready()
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        multiply(a, b).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * 4096 * 1024 * 1024 / min(seconds)


def read_results(
    table: PaperTable, cells: Mapping[tuple[str, str, int], SweepCell], failed: Collection[SweepCell]
) -> dict[tuple[str, str], dict[int, float]]:
    """Reads the columns that require training, as {(row, column): {seed: newest value}}.

    Omits failed runs and values that are not finite. Raises UserError for a missing metric.
    """
    results: dict[tuple[str, str], dict[int, float]] = {}
    for column in table.columns:
        for (stage, row, seed), cell in cells.items():
            if column.metric in COUNTED_METRICS or stage != column.stage.name or cell in failed:
                continue
            if (value := _read_metric_value(column, cell)) is not None:
                results.setdefault((row, column.name), {})[seed] = value
    return results


def _read_metric_value(column: TableColumn, cell: SweepCell) -> float | None:
    (run,) = run_records.read_runs([str(cell.folder)])
    latest = run.find_latest_evaluations()
    record = latest.get(column.evaluation)
    if record is None or column.metric not in record.numbers:
        known = ', '.join(f'{kind} {name}' for kind, metrics in latest.items() for name in metrics.numbers) or 'none'
        raise UserError(f'{cell.folder} has no metric {column.metric} of {column.evaluation}; its metrics are {known}')
    return record.numbers[column.metric]


@dataclasses.dataclass(frozen=True)
class ComparedNumber:
    """The comparison of a published number with our result.

    Attributes:
        published: the published number, or None.
        ours: mean of our results over seeds, or None if no run has finished.
        deviation: standard deviation of our results over seeds, or None for fewer than two seeds.
        published_difference: published difference from the baseline.
        difference: our mean difference from the baseline, over the seeds that both models have.
        margin: half-width of the 90% confidence interval of `difference`; infinity if there is none (see `t_interval`).
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
    same sign, and contradicted otherwise. If the interval includes zero, the verdict is 'not shown'. A counted number
    is reproduced if it is within COUNT_TOLERANCE of the published number, and otherwise different.
    """
    for index, column in enumerate(table.columns):
        published = {row.name: row.numbers[index] for row in table.rows}
        base = results.get((table.baseline, column.name), {})
        for row in table.rows:
            by_seed = results.get((row.name, column.name), {})
            number, published_base = published[row.name], published[table.baseline]
            ours = statistics.fmean(by_seed.values()) if by_seed else None
            finding = ComparedNumber(number, ours, statistics.stdev(by_seed.values()) if len(by_seed) > 1 else None)
            gains = [value - base[seed] for seed, value in by_seed.items() if seed in base]
            if column.metric in COUNTED_METRICS:
                if ours is not None and number is not None:
                    is_close = abs(ours / number - 1) <= COUNT_TOLERANCE
                    finding = dataclasses.replace(finding, verdict=REPRODUCED if is_close else DIFFERENT)
            elif gains and row.name != table.baseline:
                (difference, margin), verdict = map(float, t_interval(gains)), ''
                published_difference = None
                if number is not None and published_base is not None:
                    published_difference = number - published_base
                if published_difference:
                    agrees = published_difference * difference > 0
                    verdict = NOT_SHOWN if abs(difference) <= margin else REPRODUCED if agrees else CONTRADICTED
                finding = ComparedNumber(
                    number, ours, finding.deviation, published_difference, difference, margin, verdict
                )
            yield column, row, finding
