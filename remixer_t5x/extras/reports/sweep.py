"""Runs the training processes of `remixer-t5x compare` and `reproduce`, and skips finished runs.

A failed run does not affect the others. An interrupted run resumes from its checkpoint when the command is repeated.
"""

import contextlib
import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from etils import epath

from remixer_t5x import ranges, untrusted_files
from remixer_t5x.cli import arguments
from remixer_t5x.errors import UserError, format_count
from remixer_t5x.run_folder import model_dir, object_store

# Without -P, modules in the current folder would take precedence over installed modules.
PROGRAM = (sys.executable, '-P', '-m', 'remixer_t5x.cli.main')
# Name of the file in the sweep's folder that lists the finished commands.
FINISHED_FILE = 'finished.jsonl'
# Macros for the number of steps; runs/finetune.gin sets the first to the second.
STEPS = ('TRAIN_STEPS', 'TRAIN_STEPS_RELATIVE')
# Macros that the sweep sets for each run, and the flags to use instead.
RUN_MACROS = {'MODEL_DIR': '--folder=DIR', 'SEED': '--seeds=0,1,2'}
# Macros whose values may differ from an existing run.
_CHANGEABLE = ('SEED', *STEPS, 'LOG_PERIOD', 'EVAL_PERIOD', 'CHECKPOINT_PERIOD')
# Pairs (macro, value), with the value as a string.
Setting = tuple[tuple[str, str], ...]
# Seconds between progress lines of a run, and between checks for ended runs.
_PROGRESS_PERIOD, _POLL_PERIOD = 30.0, 0.1


@dataclasses.dataclass(frozen=True)
class SweepCell:
    """One run of the sweep: a model, a setting of the search (empty without a search), and a seed."""

    model: str
    setting: Setting
    seed: int
    folder: pathlib.Path
    command: tuple[str, ...]

    @property
    def name(self) -> str:
        return join_run_name(self.model, self.setting, self.folder.name.replace('_', ' '))

    @property
    def log_path(self) -> pathlib.Path:
        return self.folder.parent / f'{self.folder.name}.log'


def join_run_name(model: str, setting: Setting, run: str = '') -> str:
    return ', '.join(filter(None, (model, format_setting(setting), run)))


def format_setting(setting: Setting) -> str:
    """Formats a setting, as in `LEARNING_RATE=1e-3, DROPOUT_RATE=0.1`."""
    return ', '.join(f'{name}={value}' for name, value in setting)


def parse_seeds(text: str) -> list[int]:
    """Parses the comma-separated seeds of a `--seeds` flag."""
    texts = arguments.split_names(text)
    seeds = [seed for item in texts if (seed := ranges.parse_whole_number(item)) is not None]
    if not seeds or len(set(seeds)) < len(texts):
        raise UserError(
            f'--seeds must be distinct whole numbers from 0 to {2**31 - 1:,}, got {text}; pass --seeds=0,1,2'
        )
    return seeds


def reject_run_macros(gin_flags: Sequence[tuple[str, str]], macros: Mapping[str, str] = RUN_MACROS) -> None:
    """Raises UserError if a flag sets a macro whose value differs between runs; `macros` maps its name to advice."""
    for name, _ in gin_flags:
        if name in macros:
            raise UserError(f'--gin.{name} must be omitted, because each run has its own value; use {macros[name]}')


class SweepStopped(Exception):
    """Raised when a sweep is stopped; the argument is the exit code."""


class Sweep:
    """Runs the cells of a sweep in `folder`.

    Attributes:
        failed: maps each failed cell to the last error in the cell's log.
        continued: folders of runs that `check_existing_run` will continue with more steps.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.failed: dict[SweepCell, str] = {}
        self.continued: set[pathlib.Path] = set()
        with object_store.wrap_write_errors(epath.Path(folder)):
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / FINISHED_FILE
        with untrusted_files.convert_to_user_errors(path, 'remove it, and all runs start from their last checkpoints'):
            lines = list(untrusted_files.read_json_lines(path)) if path.exists() else []
        self._finished = [line.value for line in lines if isinstance(line.value, list)]

    def check_existing_run(self, folder: pathlib.Path, ignored: Collection[str] = ()) -> None:
        """Compares the loaded configuration and its data with those of an earlier run in `folder`, if there is one.

        A run with fewer TRAIN_STEPS than the configuration will be continued. Raises UserError if TRAIN_STEPS has
        decreased, or if another setting, except those in `ignored`, or the training or evaluation data has changed.
        """
        from remixer_t5x.checkpoints import checkpoint_paths, compatibility
        from remixer_t5x.config import loading
        from remixer_t5x.extras.reports.run_records import RecordedRun

        config, flag = folder / model_dir.CONFIG, f'--gin.MODEL_DIR={folder}'
        is_finished = any(flag in command for command in self._finished)
        # A run that failed before its first checkpoint starts again, with other settings if they have changed.
        has_results = is_finished or checkpoint_paths.list_steps(epath.Path(folder) / model_dir.CHECKPOINTS)
        if not has_results or not config.is_file():
            return
        texts = untrusted_files.read_text(config, 'restore it, or remove it'), loading.get_config_text()
        steps, new_steps = (RecordedRun('', '', (), text).find_whole_number(STEPS[0]) or 0 for text in texts)
        changes = [compatibility.describe_config_changes(*texts, (*_CHANGEABLE, *ignored))]
        if new_steps < steps:
            changes.append(f'{STEPS[0]} {steps} -> {new_steps}')
        if changed := ', '.join(filter(None, changes)) or _describe_data_change(folder):
            raise UserError(
                f'{folder} was started with other settings or data ({changed}); restore them, or use another --folder'
            )
        if new_steps > steps:
            self.continued.add(folder)
            self._finished = [command for command in self._finished if flag not in command]

    def run(self, cells: Sequence[SweepCell], parallel: int = 1) -> None:
        """Runs the cells that have not finished, up to `parallel` of them at the same time.

        Raises SweepStopped if a signal stopped the sweep; the exit code is 128 plus the signal number. If another error
        is raised, sends SIGTERM to the running processes, and waits until they have saved checkpoints.
        """
        from remixer_t5x.train import preemption

        finished = [cell for cell in cells if list(cell.command) in self._finished and cell.folder.is_dir()]
        todo = [cell for cell in cells if cell not in finished and cell not in self.failed]
        if self.continued:
            self._write_finished()
        count = format_count(len(cells), 'run')
        print_progress_line(f'{count}, {len(cells) - len(todo)} finished before; in {self.folder}')
        started, running, received, stop_signal = 0, list[_RunProcess](), list[int](), 0
        with contextlib.ExitStack() as handlers:
            # After an error of the sweep, such as a full disk, the processes would otherwise continue to run.
            handlers.callback(_stop_processes, running)
            for number in preemption.get_stop_signals():
                previous = signal.signal(number, lambda number, _: received.append(number))
                handlers.callback(signal.signal, number, previous)
            while received or running or (started < len(todo) and not stop_signal):
                while received:
                    stop_signal = received.pop(0)
                    for process in running:
                        print_progress_line(
                            f'{signal.Signals(stop_signal).name}: {process.cell.name} saves a checkpoint, '
                            'then the sweep ends'
                        )
                        process.send_signal(stop_signal)
                while len(running) < parallel and started < len(todo) and not stop_signal:
                    cell, started = todo[started], started + 1
                    print_progress_line(f'{started} of {len(todo)}: {cell.name}; {cell.log_path}')
                    running.append(_RunProcess(cell))
                time.sleep(_POLL_PERIOD)
                for process in tuple(running):
                    if process.poll() is None:
                        process.show_progress()
                    else:
                        running.remove(process)
                        self._record_outcome(process, bool(stop_signal))
        if stop_signal:
            print_progress_line('stopped; run the same command again to continue')
            raise SweepStopped(128 + stop_signal)

    def _record_outcome(self, process: '_RunProcess', stopped: bool) -> None:
        """Records whether a run finished or failed."""
        cell = process.cell
        if process.returncode == 0:
            self._finished.append(list(cell.command))
            self._write_finished()
            print_progress_line(f'{cell.name}: finished in {time.monotonic() - process.start:,.0f} s')
        elif not stopped:
            self.failed[cell] = process.read_last_line('error') or 'no output'
            print_progress_line(f'{cell.name}: FAILED with {process.returncode}: {self.failed[cell]}')

    def _write_finished(self) -> None:
        path = epath.Path(self.folder / FINISHED_FILE)
        with object_store.wrap_write_errors(path):
            object_store.write_atomically(path, ''.join(json.dumps(command) + '\n' for command in self._finished))


def _describe_data_change(folder: pathlib.Path) -> str | None:
    """Describes the difference between the data of the loaded configuration and that of the newest checkpoint."""
    from remixer_t5x.checkpoints import checkpoint_paths, saved_params
    from remixer_t5x.config import reference_resolver
    from remixer_t5x.data import fingerprint, pipeline
    from remixer_t5x.evaluate import task_examples

    checkpoints = epath.Path(folder) / model_dir.CHECKPOINTS
    if not (steps := checkpoint_paths.list_steps(checkpoints)):
        return None
    record = saved_params.read_record(checkpoints / str(steps[-1]))
    dataset = reference_resolver.call_configured(pipeline.DatasetConfig, 'train')
    data = pipeline.prepare_data(dataset, reference_resolver.evaluate_macro('MODEL').vocab_size).record['data']
    difference = fingerprint.describe_data_difference(record['data'], data)
    if difference is None and (evaluated := record.get('evaluation_data')) is not None:
        names = reference_resolver.evaluate_macro('EVAL_MIXTURE_OR_TASK_NAME')
        split, only = (reference_resolver.evaluate_macro(name, None) for name in ('EVAL_SPLIT', 'EVAL_TASKS'))
        tasks, _ = task_examples.find_tasks(names, split, only)
        difference = fingerprint.describe_data_difference(evaluated, fingerprint.fingerprint_tasks(tasks, split))
    return difference


class _RunProcess(subprocess.Popen):
    """The process of a `SweepCell` that is running."""

    def __init__(self, cell: SweepCell):
        self.cell, self.start = cell, time.monotonic()
        self._next_progress, self._shown_line = self.start + _PROGRESS_PERIOD, ''
        with object_store.wrap_write_errors(epath.Path(cell.folder.parent)):
            cell.folder.parent.mkdir(parents=True, exist_ok=True)
            log = cell.log_path.open('ab')
        with log:
            # Earlier attempts have written to the same log.
            self._log_start = log.tell()
            # In a new process group, the child receives only the SIGINT that the sweep forwards.
            super().__init__([*PROGRAM, *cell.command], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def show_progress(self) -> None:
        """Prints the last line of the log every `_PROGRESS_PERIOD`, if it has changed."""
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + _PROGRESS_PERIOD
            line = self.read_last_line()
            if line != self._shown_line:
                print_progress_line(f'{self.cell.name}: {line}')
                self._shown_line = line

    def read_last_line(self, prefix: str = '') -> str:
        """Returns the last logged line that starts with `prefix`; without such a line, the last line, or ''."""
        with self.cell.log_path.open('rb') as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors='replace').strip().splitlines() or ['']
        return next((line for line in reversed(lines) if line.startswith(prefix)), lines[-1])


def _stop_processes(processes: Sequence[_RunProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def print_progress_line(line: str) -> None:
    """Prints progress to standard error, so that standard output contains only results."""
    print(line, file=sys.stderr, flush=True)
