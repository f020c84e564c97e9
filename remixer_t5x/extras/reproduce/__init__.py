"""`remixer-t5x reproduce`: trains the models of a paper's table and prints the results next to the published ones."""

import argparse
import itertools
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from remixer_t5x.cli import arguments, console
from remixer_t5x.cli.arguments import Command
from remixer_t5x.errors import UserError

_SEEDS = {'small': '0,1,2', 'paper': '0'}
# Each run at small scale uses about 1.8 GB of memory.
_MAX_PARALLEL_RUNS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser, model=False)
    name = 'name of a table, such as remixers/table_4; --list prints all names'
    parser.add_argument('table', nargs='?', metavar='PAPER/TABLE', help=name)
    names = 'list all tables and figures, with the reason if one cannot be reproduced'
    parser.add_argument('--list', action='store_true', help=names)
    scale = 'small (default): models that train in minutes on two CPU cores; paper: models and data of the paper'
    parser.add_argument('--scale', choices=('small', 'paper'), default='small', help=scale)
    parser.add_argument(
        '--seeds', metavar='NUMBERS', help='comma-separated seeds (default 0,1,2 for small, 0 for paper)'
    )
    folder = 'folder for the runs (default runs/reproduce/PAPER/TABLE/SCALE)'
    parser.add_argument('--folder', type=arguments.parse_local_path, metavar='DIR', help=folder)
    parser.add_argument(
        '--chip', default='h100', metavar='NAME', help='chip for the estimated hours in the cost table (default h100)'
    )
    parser.add_argument('--dry_run', action='store_true', help='print the cost of each run without training')


def run(args: argparse.Namespace) -> int:
    """Prints the cost of each run, starts the runs that have not finished, and prints the table; returns the exit code.

    Raises:
        UserError: a flag is invalid.
    """
    from remixer_t5x.extras.reports import cost_matching, sweep
    from remixer_t5x.extras.reproduce import tables

    if args.list:
        console.print_with_rich(_build_list_of_tables(tables.list_tables()))
        return 0
    if not args.table:
        raise UserError('reproduce needs a table, such as remixers/table_4; run reproduce --list to list all tables')
    checkpoint_advice = '--folder=DIR with the runs of the previous stage'
    sweep.reject_run_macros(args.gin_flags, {**sweep.RUN_MACROS, 'INITIAL_CHECKPOINT_PATH': checkpoint_advice})
    table = tables.load_table(args.table, args.scale)
    seeds = sweep.parse_seeds(args.seeds or _SEEDS[args.scale])
    cost_matching.import_jax_on_cpu()
    from remixer_t5x.extras.reproduce import table_runs

    folder = pathlib.Path(args.folder or f'runs/reproduce/{args.table}/{args.scale}').expanduser().absolute()
    args.folder = str(folder)
    trains = not table.has_only_counted_columns and not args.dry_run
    cells, runner = table_runs.plan_runs(table, args, seeds, folder), sweep.Sweep(folder) if trains else None
    costs = {}
    for stage, model in itertools.product(table.stages, table.rows):
        costs[stage.name, model.name] = table_runs.compute_run_cost(stage, model, args)
        if runner is not None:
            for seed in seeds:
                cell = cells[stage.name, model.name, seed]
                runner.check_existing_run(cell.folder, ('INITIAL_CHECKPOINT_PATH',))
                previous = cells.get((stage.previous_stage, model.name, seed))
                if previous and previous.folder in runner.continued and cell.folder.exists():
                    raise UserError(
                        f'{cell.folder} started from fewer steps of {previous.folder}; remove it to finetune again, '
                        'or use another --folder'
                    )
    results = table_runs.compute_counted_results(table, costs)
    if not table.has_only_counted_columns:
        console.print_with_rich(f'{args.table}: {table.title}', _cost_table(table, costs, args.chip, len(seeds)))
        if runner is None:
            return 0
        parallel = 1
        # Small runs use the CPU unless JAX_PLATFORMS is set, because the first run would reserve a GPU's memory.
        if args.scale == tables.SMALL and os.environ.setdefault('JAX_PLATFORMS', 'cpu') == 'cpu':
            parallel = min(os.cpu_count() or 1, _MAX_PARALLEL_RUNS)
        try:
            for stage in table.stages:
                # Stages run in order, because a run may start from a checkpoint of an earlier stage.
                stage_cells = {key: cell for key, cell in cells.items() if key[0] == stage.name}
                for (_, row, seed), cell in stage_cells.items():
                    # A failed run may have left a checkpoint, but not that of its last step.
                    if (previous := cells.get((stage.previous_stage, row, seed))) in runner.failed:
                        runner.failed[cell] = f'{previous.name} failed'
                        sweep.print_progress_line(f'{cell.name}: skipped, because {runner.failed[cell]}')
                runner.run(list(stage_cells.values()), parallel)
        except sweep.SweepStopped as stop:
            return stop.args[0]
        results |= table_runs.read_results(table, cells, runner.failed)
    legend = _COUNTED_LEGEND if table.has_only_counted_columns else _LEGEND.format(table.baseline)
    console.print_with_rich(
        f'{args.table}: {table.title}', *_result_tables(table, table_runs.compare_with_paper(table, results)), legend
    )
    if table.note:
        console.print_with_rich(table.note)
    return int(runner is not None and bool(runner.failed))


_LEGEND = (
    'mean ± standard deviation over seeds; differences from {} are paired by seed, ± half of the 90% interval.\n'
    'reproduced: the same sign as in the paper, and the interval excludes 0; '
    'contradicted: the opposite sign, and the interval excludes 0.'
)
_COUNTED_LEGEND = 'reproduced: within 5% of the paper; counted from shapes, without training'


def _build_list_of_tables(entries: Mapping[str, Mapping[str, Any]]) -> Any:
    from remixer_t5x.extras.reproduce import tables

    headings = 'table', 'what it shows', 'at small scale'
    result = console.build_table(*headings, words=headings)
    for name, entry in entries.items():
        if 'reason' in entry:
            result.add_row(name, entry['title'], f'not available: {entry["reason"]}')
            continue
        counted = tables.are_counted_metrics(column['metric'] for column in entry['columns'].values())
        small = [label for label, column in entry['columns'].items() if column.get('small')]
        result.add_row(name, entry['title'], 'counted' if counted else ', '.join(small) or 'only --scale=paper')
    return result


def _cost_table(table: Any, costs: Mapping[tuple[str, str], Any], chip: str, seeds: int) -> Any:
    """Builds a table with the cost of each run for one seed, and the total for all seeds."""
    from remixer_t5x.cli.info.model import format_quantity
    from remixer_t5x.devices import chips
    from remixer_t5x.extras.reproduce import table_runs

    peaks = chips.get_chip(chip).peak_flops_per_second('bf16'), table_runs.measure_matmul_flops_per_second()

    def format_hours(flops: float) -> list[str]:
        values = [flops / (table_runs.UTILIZATION * peak) / 3600 for peak in peaks]
        return [f'{value:,.2g}' if value < 10 else f'{value:,.0f}' for value in values]

    headings = ['model', 'stage', 'parameters', 'steps', 'FLOPs', f'{chip} hours', 'hours on this CPU']
    result = console.build_table(*headings, words=('model', 'stage'))
    for (stage, row), cost in costs.items():
        sizes = f'{cost.parameters:,}', f'{cost.steps:,}', format_quantity(cost.flops)
        result.add_row(row, stage, *sizes, *format_hours(cost.flops))
    result.add_section()
    total = seeds * sum(cost.flops for cost in costs.values())
    result.add_row('all seeds', f'{seeds} x {len(costs)} runs', '', '', format_quantity(total), *format_hours(total))
    return result


def _result_tables(table: Any, findings: Iterable[tuple[Any, Any, Any]]) -> Sequence[Any]:
    """Builds one table per column of the paper's table, to compare our results with the published numbers."""

    def format_number(value: float | None, signed: bool = False) -> str:
        return '' if value is None else f'{value:{"+" if signed else ""},.4g}'

    results: dict[str, Any] = {}
    for column, row, finding in findings:
        if column.name not in results:
            # The heading names the evaluation data, because small-scale runs use different data than the paper.
            heading = f'{column.name} ({column.evaluation} {column.metric})' if column.evaluation else column.name
            differences = () if table.has_only_counted_columns else ("paper's difference", 'our difference')
            results[column.name] = console.build_table(
                heading, 'paper', 'ours', *differences, 'verdict', words=(heading, 'verdict')
            )
        ours = format_number(finding.ours) + (f' ± {finding.deviation:.2g}' if finding.deviation is not None else '')
        cells = [format_number(finding.published), ours]
        if not table.has_only_counted_columns:
            difference = format_number(finding.difference, signed=True)
            if finding.margin is not None:
                difference += f' ± {finding.margin:.2g}' if finding.margin < float('inf') else ' (no interval)'
            cells += [format_number(finding.published_difference, signed=True), difference]
        verdict = 'baseline' if row.name == table.baseline and not table.has_only_counted_columns else finding.verdict
        results[column.name].add_row(row.name, *cells, verdict)
    return list(results.values())


COMMAND = Command(
    'reproduce',
    "train the models of a paper's table and print our numbers next to the paper's; run it again to continue",
    add_arguments,
    run,
    (
        'remixer-t5x reproduce --list',
        'remixer-t5x reproduce remixers/table_4',
        'remixer-t5x reproduce remixers/table_4 --scale=paper --dry_run',
    ),
)
