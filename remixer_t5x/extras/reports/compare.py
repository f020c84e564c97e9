"""`remixer-t5x compare`: trains one recipe with several models and seeds, then prints a table and writes a report.

Each run is a separate process, so that a failure does not affect the others, and resumes from its checkpoints. The same
command again skips finished runs.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from remixer_t5x import ranges, untrusted_files
from remixer_t5x.cli import arguments, console, train
from remixer_t5x.cli.command import Command
from remixer_t5x.errors import UserError

# -P: without it, Python searches the current folder for its own modules first.
PROGRAM = (sys.executable, '-P', '-m', 'remixer_t5x.cli.main')
COMMANDS = (train.TRAIN.name, train.FINETUNE.name)
# A file in the folder of the sweep with the commands that have finished.
FINISHED = 'finished.jsonl'
REPORT = 'report.html'
_USER_MISTAKE = 2
# Seconds between two lines of progress.
_PROGRESS_PERIOD = 30.0
# Macros that the sweep sets for each run, and the flags to type instead.
_SWEEP_MACROS = {'MODEL_DIR': '--folder=DIR', 'SEED': '--seeds=0,1,2'}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the sweep. `model` is its label, and `files` its `--model`."""

    model: str
    seed: int
    folder: pathlib.Path
    command: tuple[str, ...]
    files: str = ''

    @property
    def name(self) -> str:
        return f'{self.model}, seed {self.seed}'

    @property
    def log(self) -> pathlib.Path:
        return self.folder.with_suffix('.log')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin(parser, model=False)
    parser.add_argument('compared', metavar='COMMAND', choices=COMMANDS, help='train or finetune')
    models = 'comma-separated files of models/, or your own, as in mine.gin; remixer+NAME=VALUE overrides a setting'
    parser.add_argument('--models', metavar='NAMES', help=models)
    parser.add_argument('--seeds', metavar='NUMBERS', default='0', help='comma-separated (default 0)')
    parser.add_argument('--folder', metavar='DIR', help='folder for a MODEL_DIR per run, and report.html')


def run(args: argparse.Namespace) -> int:
    """Runs the missing runs, then prints the table and writes the report; returns the exit code.

    Raises:
        UserError: a mistake in the command, or one that a run reports.
    """
    cells = plan(args)
    folder = cells[0].folder.parents[1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'{folder} cannot be created ({error.strerror}); type another --folder') from None
    costs = _model_costs(args, cells)
    for name, (parameters, _) in costs.items():
        _print(f'{name}: {parameters:,} parameters')
    sizes = {name: parameters for name, (parameters, _) in costs.items()}
    if sizes and max(sizes.values()) > 1.05 * min(sizes.values()):
        smallest, largest = min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__)
        excess = sizes[largest] / sizes[smallest] - 1
        _print(f'warning: {largest} has {excess:.0%} more parameters than {smallest}; the sizes are not matched')
    finished = _finished(folder)
    todo = [cell for cell in cells if list(cell.command) not in finished or not cell.folder.is_dir()]
    _print(f'{len(cells)} runs, {len(cells) - len(todo)} finished before; in {folder}')
    failed = []
    for number, cell in enumerate(todo, 1):
        _print(f'{number} of {len(todo)}: {cell.name}; {cell.log}')
        start = time.monotonic()
        code, stop_signal = _run_cell(cell)
        if code == 0:
            with (folder / FINISHED).open('a') as file:
                file.write(json.dumps(list(cell.command)) + '\n')
            _print(f'{cell.name}: finished in {time.monotonic() - start:,.0f} s')
        if stop_signal:
            _print('stopped; run the same command again to continue')
            return 128 + stop_signal
        if code == _USER_MISTAKE:
            raise UserError(f'{cell.name}: {_last_line(cell.log).removeprefix("error: ")}')
        if code:
            failed.append(cell)
            _print(f'{cell.name}: FAILED with {code}: {_last_line(cell.log)}')
    if succeeded := [cell for cell in cells if cell not in failed]:
        _show_results(args, succeeded, folder, costs)
    return int(bool(failed))


def plan(args: argparse.Namespace) -> list[Cell]:
    """Lists all runs, seed by seed, so that a stopped sweep has equally many runs of each model."""
    from remixer_t5x.config import files, loading

    for name, _ in args.gin_flags:
        if name in _SWEEP_MACROS:
            raise UserError(f'--gin.{name} is set for each run; type {_SWEEP_MACROS[name]} instead')
    names = _split_names(args.models, '--models=t5_1_1,remixer')
    # Labels for folders and tables: `./mine.gin+ablations/x` becomes `mine+ablations/x`.
    parts = {name: [part.strip().removeprefix('./').removesuffix('.gin') for part in name.split('+')] for name in names}
    models = {'+'.join(parts[name]): name for name in names}
    if len(models) < len(names):
        raise UserError(f'--models={args.models} names a model twice; name each once')
    search_paths = arguments.names(','.join(args.gin_search_paths))
    # Finds a missing file before another model is trained.
    for name in names:
        for file in loading.model_files(name, search_paths):
            if '=' not in file:
                files.find(file, search_paths, asked_by=f'--models has {name}: ')
    seeds = _split_names(args.seeds, '--seeds=0,1,2')
    if wrong := [seed for seed in seeds if ranges.whole_number(seed) is None]:
        raise UserError(f'--seeds must be whole numbers, got {wrong[0]!r}; type --seeds=0,1,2')
    if not args.folder:
        raise UserError('compare needs a folder for its runs; type --folder=runs/compared')
    folder = pathlib.Path(args.folder).expanduser().absolute()
    recipe = [
        *(f'--gin_search_paths={paths}' for paths in args.gin_search_paths),
        *(f'--gin_file={file}' for file in args.gin_file),
        *(f'--gin.{name}={value}' for name, value in args.gin_flags),
    ]
    cells = []
    for seed in map(int, seeds):
        for label, model in models.items():
            run_folder = folder / label.replace('/', '_') / f'seed_{seed}'
            flags = (f'--model={model}', f'--gin.SEED={seed}', f'--gin.MODEL_DIR={run_folder}')
            cells.append(Cell(label, seed, run_folder, (args.compared, *recipe, *flags), model))
    return cells


def _model_costs(args: argparse.Namespace, cells: Sequence[Cell]) -> dict[str, tuple[int, float]]:
    """Number of parameters of each model, and FLOPs of its forward pass for one example.

    Loads the configuration of each model as its run does, so that a mistake in the last model stops the sweep before
    the first one trains for hours. Raises UserError, with the model's name, for the first mistake.
    """
    # This process only computes shapes, on the CPU, because the runs need the accelerator. They get the environment
    # without the change.
    platforms = os.environ.get('JAX_PLATFORMS')
    os.environ['JAX_PLATFORMS'] = 'cpu'
    try:
        with arguments.libraries(args):
            from remixer_t5x.config import loading, resolved
            from remixer_t5x.costs import counts
    finally:
        del os.environ['JAX_PLATFORMS']
        if platforms is not None:
            os.environ['JAX_PLATFORMS'] = platforms
    search_paths = arguments.names(','.join(args.gin_search_paths))
    flags = [*args.gin_flags, ('SEED', '0'), ('MODEL_DIR', str(cells[0].folder))]
    costs = {}
    for name, files in {cell.model: cell.files for cell in cells}.items():
        given = loading.Given(args.gin_file, flags, search_paths, loading.model_files(files, search_paths))
        try:
            loading.load(given, train.ROOT, partial=False)
            count = counts.count(resolved.macro('MODEL'), resolved.macro('TASK_FEATURE_LENGTHS'))
        except UserError as error:
            raise UserError(f'{name}: {error}') from error
        costs[name] = count.total_parameters, count.total_forward_flops
    return costs


def _split_names(text: str | None, example: str) -> list[str]:
    """Splits a flag at commas. Raises UserError for no items, or an item that is repeated."""
    flag = example.partition('=')[0]
    items = [item.strip() for item in (text or '').split(',') if item.strip()]
    if not items:
        raise UserError(f'{flag} has no value; type {example}')
    if len(set(items)) < len(items):
        raise UserError(f'{flag}={text} has a repeated item; name each once')
    return items


def _run_cell(cell: Cell) -> tuple[int, int]:
    """Runs one cell; returns its exit code, and the signal that stops the sweep (0: none), upon which the run saves."""
    from remixer_t5x.train import preemption

    stop_signal, shown_step = 0, -1
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    with cell.log.open('ab') as log:
        # New process group, so the child gets one SIGINT, forwarded by us.
        process = subprocess.Popen(
            [*PROGRAM, *cell.command], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

        def forward(number: int, _: object) -> None:
            nonlocal stop_signal
            stop_signal = number
            _print(f'{signal.Signals(number).name}: {cell.name} saves, then the sweep ends')
            process.send_signal(number)

        handlers = {number: signal.signal(number, forward) for number in preemption.stop_signals()}
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_PROGRESS_PERIOD), stop_signal
                step, line = _progress(cell.folder)
                if step > shown_step:
                    _print(f'{cell.name}: {line}')
                    shown_step = step
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _progress(folder: pathlib.Path) -> tuple[int, str]:
    """The last logged step of a run, and a line with step, loss and time left. -1 if there are no metrics yet."""
    from remixer_t5x.extras.reports import overview, records, run_folders
    from remixer_t5x.train import progress

    try:
        (run,) = run_folders.read_all([str(folder)])
    except UserError:
        return -1, ''
    numbers, seconds = overview.overview(run), run.series(records.TRAIN, 'seconds_per_step')
    parts = [f'step {numbers.step:,}' + (f' of {numbers.steps:,}' if numbers.steps else '')]
    if numbers.train_loss is not None:
        parts.append(f'loss {numbers.train_loss:.4f}')
    if numbers.steps and seconds:
        parts.append(f'{progress.duration((numbers.steps - numbers.step) * seconds[-1][1])} left')
    return numbers.step, ', '.join(parts)


def _finished(folder: pathlib.Path) -> list[list[str]]:
    """The commands that have succeeded in this folder. Skips an incomplete line."""
    path = folder / FINISHED
    commands = []
    with untrusted_files.user_errors(path, 'remove it, and every run starts again from its last checkpoint'):
        for line in untrusted_files.json_lines(path) if path.exists() else ():
            if isinstance(line.value, list):
                commands.append(line.value)
    return commands


def _last_line(log: pathlib.Path) -> str:
    """The last error in the log of a run, or its last line."""
    lines = log.read_text(errors='replace').strip().splitlines()
    errors = [line for line in lines if line.startswith('error')]
    return (errors or lines or ['no output'])[-1]


def _show_results(
    args: argparse.Namespace, cells: Sequence[Cell], folder: pathlib.Path, costs: Mapping[str, tuple[int, float]]
) -> None:
    with arguments.libraries(args):
        from remixer_t5x.extras.reports import overview, records, run_folders, tables, write

    folders = [str(cell.folder) for cell in cells]
    models = {str(cell.folder): cell.model for cell in cells}
    runs = run_folders.read_all(folders)
    groups = [dataclasses.replace(group, name=models[group.runs[0].folder]) for group in records.by_seed(runs)]
    rows, overviews = tables.task_table(groups), {run.name: overview.overview(run) for run in runs}
    headline = tables.headline(groups, tables.main_rows(rows), overviews)
    console.show(table(groups, rows, overviews, costs), *headline)
    write.write(folders, str(folder / REPORT))


def table(
    groups: Sequence[Any], rows: Sequence[Any], overviews: Mapping[str, Any], costs: Mapping[str, tuple[int, float]]
) -> Any:
    """A row for each model: parameters, FLOPs of an example, losses, metrics of tasks and speed.

    Losses, metrics (`rows` of `tables.task_table`) and speed are means over seeds with standard deviations.
    """
    from remixer_t5x.cli.info.model import quantity
    from remixer_t5x.extras.reports import tables

    def text(cell: Any, digits: int) -> str:
        if cell is None:
            return '-'
        return f'{cell.mean:,.{digits}f}' + ('' if cell.deviation is None else f' ± {cell.deviation:,.{digits}f}')

    def mean(values: Sequence[float | None], digits: int) -> str:
        present = [value for value in values if value is not None]
        return text(tables.cell(present) if present else None, digits)

    headings = ['model', 'parameters', 'FLOPs', 'seeds', 'train loss', 'held-out loss']
    headings += [f'{kind}: {metric}' for kind, metric, _ in rows]
    result = console.table(*headings, 'tokens/s', words=('model',))
    for index, group in enumerate(groups):
        runs = [overviews[run.name] for run in group.runs]
        cost = (f'{costs[group.name][0]:,}', quantity(costs[group.name][1])) if group.name in costs else ('-', '-')
        losses = [mean([run.train_loss for run in runs], 4), mean([run.held_out for run in runs], 4)]
        metrics = [text(cells[index], 2) for _, _, cells in rows]
        speed = mean([run.tokens_per_second for run in runs], 0)
        result.add_row(group.name, *cost, str(len(runs)), *losses, *metrics, speed)
    return result


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


COMMAND = Command(
    'compare',
    'trains one recipe with several models and seeds, prints a table, writes a report; run it again to continue',
    add_arguments,
    run,
    (
        'remixer-t5x compare train --gin_file=experiments/python_docs.gin --models=t5_1_1,remixer,hyper_mixer '
        '--seeds=0,1,2 --folder=runs/compared',
    ),
)
