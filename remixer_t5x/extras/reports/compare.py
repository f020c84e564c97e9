"""`remixer-t5x compare`: one recipe for a list of models and seeds, run by run, and at the end a table and a report.

Each run is a process of the command line, typed as a user would type it: whatever stops one leaves the others alone,
and it resumes by itself. Started again, the sweep goes over what is finished and does the rest.
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
from collections.abc import Iterator, Sequence
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.cli import arguments, console, train
from remixer_t5x.cli.command import Command
from remixer_t5x.errors import UserError

# -P: without it Python would look for its own modules in the current folder first.
PROGRAM = (sys.executable, '-P', '-m', 'remixer_t5x.cli.main')
COMMANDS = (train.TRAIN.name, train.FINETUNE.name)
# In the folder of the sweep: the commands that have come to their end.
FINISHED = 'finished.jsonl'
REPORT = 'report.html'
_USER_MISTAKE = 2
# Seconds between two looks at a run.
_PERIOD = 5.0
# Seconds between two lines of progress in a log that is not a terminal.
_LOG_PERIOD = 60.0
# Macros that the sweep sets for each run, and what to type instead.
_OURS = {'MODEL_DIR': '--folder=DIR', 'SEED': '--seeds=0,1,2'}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the sweep; `files` is its `--model`."""

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
    parser.add_argument('compared', metavar='COMMAND', help='train or finetune')
    models = 'files of models/, or your own such as mine.gin, by comma; remixer+ablations/NAME adds one'
    parser.add_argument('--models', metavar='NAMES', help=models)
    parser.add_argument('--seeds', metavar='NUMBERS', default='0', help='by comma (default 0)')
    parser.add_argument('--folder', metavar='DIR', help='gets a MODEL_DIR for each run, and report.html')


def run(args: argparse.Namespace) -> int:
    """Runs what is missing, then prints the table and writes the report; the exit code.

    Raises:
        UserError: a mistake in the command, or one that a run reports.
    """
    cells = plan(args)
    folder = cells[0].folder.parents[1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f'{folder} cannot be made ({error.strerror}); give another --folder') from None
    _build_models(args, cells)
    finished = _finished(folder)
    todo = [cell for cell in cells if list(cell.command) not in finished or not cell.folder.is_dir()]
    _say(f'{len(cells)} runs, {len(cells) - len(todo)} finished before; in {folder}')
    failed = []
    for number, cell in enumerate(todo, 1):
        _say(f'{number} of {len(todo)}: {cell.name}; {cell.log}')
        start = time.monotonic()
        code, asked = _run_one(cell)
        if code == 0:
            with (folder / FINISHED).open('a') as file:
                file.write(json.dumps(list(cell.command)) + '\n')
            _say(f'{cell.name}: finished in {time.monotonic() - start:,.0f} s')
        if asked:
            _say('stopped; run the same command again to continue')
            return 128 + asked
        if code == _USER_MISTAKE:
            raise UserError(f'{cell.name}: {_last_line(cell.log).removeprefix("error: ")}')
        if code:
            failed.append(cell)
            _say(f'{cell.name}: FAILED with {code}: {_last_line(cell.log)}')
    if done := [cell for cell in cells if cell not in failed]:
        _show_results(args, done, folder)
    return int(bool(failed))


def plan(args: argparse.Namespace) -> list[Cell]:
    """All runs, seed by seed, so that a sweep that is stopped has as many of one model as of the other."""
    from remixer_t5x.config import files, loading

    if args.compared not in COMMANDS:
        raise UserError(f'compare {args.compared} is not a command; type compare train or compare finetune')
    for name, _ in args.gin_flags:
        if name in _OURS:
            raise UserError(f'--gin.{name} is set for each run; type {_OURS[name]} instead')
    given = _listed(args.models, '--models=t5_1_1,remixer')
    models = {_label(model): model for model in given}
    if len(models) < len(given):
        raise UserError(f'--models={args.models} names one twice; give each once')
    search_paths = arguments.names(','.join(args.gin_search_paths))
    # Before another model is trained.
    for model in given:
        for file in loading.model_files(model, search_paths):
            files.find(file, search_paths, asked_by=f'--models has {model}: ')
    seeds = _listed(args.seeds, '--seeds=0,1,2')
    if wrong := [seed for seed in seeds if not seed.isdecimal()]:
        raise UserError(f'--seeds has {wrong[0]!r}; give whole numbers, as in --seeds=0,1,2')
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
            place = folder / label.replace('/', '_') / f'seed_{seed}'
            own = (f'--model={model}', f'--gin.SEED={seed}', f'--gin.MODEL_DIR={place}')
            cells.append(Cell(label, seed, place, (args.compared, *recipe, *own), model))
    return cells


def _label(model: str) -> str:
    """`./mine.gin+ablations/x` as `mine+ablations/x`, for folders and tables."""
    return '+'.join(name.strip().removeprefix('./').removesuffix('.gin') for name in model.split('+'))


def _build_models(args: argparse.Namespace, cells: Sequence[Cell]) -> None:
    """Reads the configuration of each model as its run will, and computes the shapes of its parameters, so that a
    mistake in the last one stops the sweep before the first one trains for hours.

    Raises UserError, with the model's name, for the first mistake.
    """
    # The runs keep the accelerator to themselves: this process computes shapes alone, and they get its environment.
    with arguments.libraries(args), _on_cpu():
        import jax

        from remixer_t5x.config import loading, resolved
        from remixer_t5x.data import frames
        from remixer_t5x.models import interface
    search_paths = arguments.names(','.join(args.gin_search_paths))
    flags = [*args.gin_flags, ('SEED', '0'), ('MODEL_DIR', str(cells[0].folder))]
    for name, files in {cell.model: cell.files for cell in cells}.items():
        given = loading.Given(args.gin_file, flags, search_paths, loading.model_files(files, search_paths))
        try:
            loading.load(given, train.ROOT, partial=False, suggest=[train.FILES[args.compared]])
            model, lengths = resolved.macro('MODEL'), resolved.macro('TASK_FEATURE_LENGTHS')
            params = interface.param_shapes(model, frames.batch_shapes(model.frame, lengths))
        except UserError as error:
            raise UserError(f'{name}: {error}') from error
        _say(f'{name}: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters')


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """JAX, if it is imported within, uses the CPU; the environment is as before afterwards."""
    before = os.environ.get('JAX_PLATFORMS')
    os.environ['JAX_PLATFORMS'] = 'cpu'
    try:
        yield
    finally:
        if before is None:
            del os.environ['JAX_PLATFORMS']
        else:
            os.environ['JAX_PLATFORMS'] = before


def _listed(text: str | None, example: str) -> list[str]:
    """Items separated by commas, each once."""
    items = [item.strip() for item in (text or '').split(',') if item.strip()]
    if not items:
        raise UserError(f'{example.partition("=")[0]} has no value; type {example}')
    if len(set(items)) < len(items):
        raise UserError(f'{example.partition("=")[0]}={text} names one twice; give each once')
    return items


def _run_one(cell: Cell) -> tuple[int, int]:
    """Exit code of the run, and the signal that asked the sweep to end (0: none); the run gets it and saves first."""
    from remixer_t5x.train import preemption

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
            _say(f'{signal.Signals(number).name}: {cell.name} saves, then the sweep ends')
            process.send_signal(number)

        watched = _Watched(cell.folder)
        before = {number: signal.signal(number, pass_on) for number in preemption.stop_signals()}
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(_PERIOD), asked
                if line := watched.look():
                    _say(f'{cell.name}: {line}')
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Watched:
    """A run in `folder` that may be in progress."""

    def __init__(self, folder: pathlib.Path):
        self._folder, self._step, self._due = folder, -1, 0.0

    def look(self) -> str:
        """A line if the run has logged another step, otherwise nothing; without a terminal at most one a minute."""
        if time.monotonic() < self._due:
            return ''
        step, line = _progress(self._folder)
        if step <= self._step:
            return ''
        self._step = step
        self._due = time.monotonic() + (0 if sys.stderr.isatty() else _LOG_PERIOD)
        return line


def _progress(folder: pathlib.Path) -> tuple[int, str]:
    """The last logged step of a run, and a line about it: step, loss, time left. -1 if nothing can be read yet."""
    from remixer_t5x.extras.reports import overview, records, run_folders
    from remixer_t5x.train import progress

    try:
        (run,) = run_folders.read_all([str(folder)])
    except UserError:
        return -1, ''
    found, seconds = overview.overview(run), run.series(records.TRAIN, 'seconds_per_step')
    parts = [f'step {found.step:,}' + (f' of {found.steps:,}' if found.steps else '')]
    if found.train_loss is not None:
        parts.append(f'loss {found.train_loss:.4f}')
    if found.steps and seconds:
        parts.append(f'{progress.duration((found.steps - found.step) * seconds[-1][1])} left')
    return found.step, ', '.join(parts)


def _finished(folder: pathlib.Path) -> list[list[str]]:
    """Commands that have ended well here; a line that was cut off counts as none."""
    path = folder / FINISHED
    found = []
    with untrusted_files.user_errors(path, 'remove it, and every run starts again from its last checkpoint'):
        for line in untrusted_files.json_lines(path) if path.exists() else ():
            if isinstance(line.value, list):
                found.append(line.value)
    return found


def _last_line(log: pathlib.Path) -> str:
    """What a run said last; of a user's mistake that is its one line."""
    lines = log.read_text(errors='replace').strip().splitlines()
    errors = [line for line in lines if line.startswith('error')]
    return (errors or lines or ['it said nothing'])[-1]


def _show_results(args: argparse.Namespace, cells: Sequence[Cell], folder: pathlib.Path) -> None:
    with arguments.libraries(args):
        from remixer_t5x.extras.reports import records, run_folders, write

    folders = [str(cell.folder) for cell in cells]
    models = {str(cell.folder): cell.model for cell in cells}
    groups = records.by_seed(run_folders.read_all(folders))
    groups = [dataclasses.replace(group, name=models.get(group.runs[0].folder, group.name)) for group in groups]
    console.show(table(groups))
    write.write(folders, str(folder / REPORT))


def table(groups) -> Any:
    """A row for each model: losses, metrics of tasks and speed, as means over seeds with standard deviations."""
    from remixer_t5x.extras.reports import overview

    tasks = overview.task_table(groups)
    headings = ['model', 'seeds', 'training loss', 'held-out loss', *(f'{kind}: {metric}' for kind, metric, _ in tasks)]
    found = console.table(*headings, 'tokens/s', words=('model',))
    for index, group in enumerate(groups):
        runs = [overview.overview(one) for one in group.runs]
        losses = [_cell([one.train_loss for one in runs], 4), _cell([one.held_out for one in runs], 4)]
        metrics = [_shown(cells[index], 2) for _, _, cells in tasks]
        speed = _cell([one.tokens_per_second for one in runs], 0)
        found.add_row(group.name, str(len(runs)), *losses, *metrics, speed)
    return found


def _cell(values: Sequence[float | None], digits: int) -> str:
    from remixer_t5x.extras.reports import overview

    present = [value for value in values if value is not None]
    return _shown(overview.cell(present) if present else None, digits)


def _shown(cell, digits: int) -> str:
    if cell is None:
        return '-'
    deviation = '' if cell.deviation is None else f' ± {cell.deviation:,.{digits}f}'
    return f'{cell.mean:,.{digits}f}{deviation}'


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


COMMAND = Command(
    'compare',
    'one recipe for several models and seeds; ends in a table and a report; the same command again continues',
    add_arguments,
    run,
    (
        'remixer-t5x compare train --gin_file=experiments/python_docs.gin --models=t5_1_1,remixer,hyper_mixer '
        '--seeds=0,1,2 --folder=runs/compared',
    ),
)
