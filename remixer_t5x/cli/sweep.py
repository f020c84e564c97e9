"""`remixer-t5x compare`: one recipe for a list of models and seeds, run by run, and at the end a table and a report.

Each run is a process of the command line, typed as a user would type it: whatever stops one leaves the others alone,
and it resumes by itself. Started again, the sweep goes over what is finished and does the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from remixer_t5x.cli import quiet
from remixer_t5x.errors import UserError

PROGRAM = (sys.executable, '-m', 'remixer_t5x.cli.main')
COMMANDS = ('train', 'finetune')
# In the folder of the sweep: the commands that have come to their end.
FINISHED = 'finished.jsonl'
REPORT = 'report.html'
_USER_MISTAKE = 2
# Macros that the sweep sets for each run, and what to type instead.
_OURS = {'MODEL_DIR': '--folder=DIR', 'SEED': '--seeds=0,1,2'}
_PIPE_WIDTH = 150


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the sweep."""

    model: str
    seed: int
    folder: pathlib.Path
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return f'{self.model}, seed {self.seed}'

    @property
    def log(self) -> pathlib.Path:
        return self.folder.with_suffix('.log')


def run(args: argparse.Namespace, gin_flags: Sequence[tuple[str, str]]) -> int:
    """Runs what is missing, then prints the table and writes the report; the exit code.

    Args:
        args: the parsed command line: COMPARED (train or finetune), COMPARE_MODELS, COMPARE_SEEDS, COMPARE_FOLDER, and
            gin files.
        gin_flags: of every run, as (name, value).

    Raises:
        UserError: a mistake in the command, or one that a run has told.
    """
    cells = plan(args, gin_flags)
    folder = cells[0].folder.parents[1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'{folder} cannot be made ({error.strerror}); give another --folder') from None
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True, markup=False)
    finished = _finished(folder)
    todo = [cell for cell in cells if list(cell.command) not in finished or not cell.folder.is_dir()]
    console.print(f'{len(cells)} runs, {len(cells) - len(todo)} finished before; in {folder}')
    failed = []
    for number, cell in enumerate(todo, 1):
        console.print(f'{number} of {len(todo)}: {cell.name}; {cell.log}')
        start = time.monotonic()
        code, asked = _run_one(cell, console)
        if code == 0:
            _keep(folder, cell)
            console.print(f'{cell.name}: finished in {time.monotonic() - start:,.0f} s')
        if asked:
            console.print('stopped; run the same command again to go on')
            return 128 + asked
        if code == _USER_MISTAKE:
            raise UserError(f'{cell.name}: {_last_line(cell.log).removeprefix("error: ")}')
        if code:
            failed.append(cell)
            console.print(f'{cell.name}: FAILED with {code}: {_last_line(cell.log)}')
    _tell(cells, failed, folder)
    return int(bool(failed))


def plan(args: argparse.Namespace, gin_flags: Sequence[tuple[str, str]]) -> list[Cell]:
    """All runs, seed by seed, so that a sweep that is stopped has as many of one model as of the other."""
    if args.COMPARED not in COMMANDS:
        raise UserError(f'compare {args.COMPARED} is no command; type compare train or compare finetune')
    for name, _ in gin_flags:
        if name in _OURS:
            raise UserError(f'--gin.{name} is set for each run; type {_OURS[name]} instead')
    models = _listed(args.COMPARE_MODELS, '--models=t5_1_1,remixer')
    seeds = _listed(args.COMPARE_SEEDS or '0', '--seeds=0,1,2')
    if wrong := [seed for seed in seeds if not seed.isdecimal()]:
        raise UserError(f'--seeds has {wrong[0]!r}; give whole numbers, as in --seeds=0,1,2')
    if not args.COMPARE_FOLDER:
        raise UserError('compare needs a folder for its runs; type --folder=runs/compared')
    folder = pathlib.Path(args.COMPARE_FOLDER).expanduser().absolute()
    recipe = [
        *(f'--gin_search_paths={paths}' for paths in args.gin_search_paths),
        *(f'--gin_file={file}' for file in args.gin_file),
        *(f'--gin.{name}={value}' for name, value in gin_flags),
    ]
    cells = []
    for seed in map(int, seeds):
        for model in models:
            place = folder / model.replace('/', '_') / f'seed_{seed}'
            own = (f'--model={model}', f'--gin.SEED={seed}', f'--gin.MODEL_DIR={place}')
            cells.append(Cell(model, seed, place, (args.COMPARED, *recipe, *own)))
    return cells


def _listed(text: str | None, example: str) -> list[str]:
    """Items separated by commas, each once."""
    items = [item.strip() for item in (text or '').split(',') if item.strip()]
    if not items:
        raise UserError(f'{example.partition("=")[0]} has no value; type {example}')
    if len(set(items)) < len(items):
        raise UserError(f'{example.partition("=")[0]}={text} names one twice; give each once')
    return items


def _run_one(cell: Cell, console: Console) -> tuple[int, int]:
    """Exit code of the run, and the signal that asked the sweep to end (0: none); the run gets it and saves first."""
    asked = 0
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    with cell.log.open('ab') as log:
        # A group of its own: Ctrl-C reaches the run once, from us.
        process = subprocess.Popen(
            [*PROGRAM, *cell.command], stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

        def pass_on(number: int, _: object) -> None:
            nonlocal asked
            asked = number
            console.print(f'{signal.Signals(number).name}: {cell.name} saves, then the sweep ends')
            process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return process.wait(), asked
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _finished(folder: pathlib.Path) -> list[list[str]]:
    """Commands that have ended well here; a line that was cut off counts as none."""
    path = folder / FINISHED
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def _keep(folder: pathlib.Path, cell: Cell) -> None:
    with (folder / FINISHED).open('a') as file:
        file.write(json.dumps(list(cell.command)) + '\n')


def _last_line(log: pathlib.Path) -> str:
    """What a run said last; of a user's mistake that is its one line."""
    lines = log.read_text(errors='replace').strip().splitlines()
    errors = [line for line in lines if line.startswith('error')]
    return (errors or lines or ['it said nothing'])[-1]


def _tell(cells: Sequence[Cell], failed: Sequence[Cell], folder: pathlib.Path) -> None:
    # They bring TensorFlow, which would log into the table.
    with quiet.imports(True):
        from remixer_t5x.cli import report, report_run
        from remixer_t5x.reports import records

    done = [cell for cell in cells if cell not in failed]
    if not done:
        return
    folders = [str(cell.folder) for cell in done]
    models = {str(cell.folder): cell.model for cell in done}
    groups = records.by_seed(report_run.read_all(folders))
    groups = [dataclasses.replace(group, name=models.get(group.runs[0].folder, group.name)) for group in groups]
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    console.print(table(groups))
    report.run(folders, out=str(folder / REPORT))


def table(groups) -> Table:
    """A row for each model: losses, metrics of tasks and speed, as means over seeds with standard deviations."""
    from remixer_t5x.reports import overview

    found = Table(box=box.SIMPLE_HEAD)
    tasks = overview.task_table(groups)
    headings = ['seeds', 'training loss', 'held-out loss', *(f'{kind}: {metric}' for kind, metric, _ in tasks)]
    found.add_column('model', no_wrap=True)
    for heading in [*headings, 'tokens/s']:
        found.add_column(heading, justify='right')
    for index, group in enumerate(groups):
        runs = [overview.overview(one) for one in group.runs]
        losses = [_cell([one.train_loss for one in runs], 4), _cell([one.held_out for one in runs], 4)]
        metrics = [_shown(cells[index], 2) for _, _, cells in tasks]
        speed = _cell([one.tokens_per_second for one in runs], 0)
        found.add_row(group.name, str(len(runs)), *losses, *metrics, speed)
    return found


def _cell(values: Sequence[float | None], digits: int) -> str:
    from remixer_t5x.reports import overview

    present = [value for value in values if value is not None]
    return _shown(overview.cell(present) if present else None, digits)


def _shown(cell, digits: int) -> str:
    if cell is None:
        return '-'
    deviation = '' if cell.deviation is None else f' ± {cell.deviation:,.{digits}f}'
    return f'{cell.mean:,.{digits}f}{deviation}'
