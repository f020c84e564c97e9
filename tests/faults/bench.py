"""Runs a command in real processes, and compares their run with an uninterrupted run."""

import dataclasses
import itertools
import os
import pathlib
import pydoc_data.topics
import random
import signal
import time
from collections.abc import Callable

import tensorflow as tf

from remixer_t5x.cli import main
from tests.support import compare_runs, feed_forward, paths, ports, real_processes

TRAIN_STEPS = 120
TINY = [
    *('train', '--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin_file=data/own_text.gin'),
    *('--gin_file=optimizers/adamw_rms.gin', '--gin_file=hardware/cpu.gin', '--gin_file=runs/pretrain.gin'),
    *('--gin.NUM_ENCODER_LAYERS=1', '--gin.NUM_DECODER_LAYERS=1', '--gin.EMBED_DIM=64', '--gin.MLP_DIM=128'),
    *('--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384', '--gin.BATCH_SIZE=12'),
    *("--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 24}", '--gin.CHECKPOINT_PERIOD=10'),
    *('--gin.WARMUP_STEPS=20', '--gin.LOG_PERIOD=1', '--gin.EVAL_PERIOD=40', '--gin.EVAL_STEPS=2'),
    *feed_forward.FLAGS,
]
# Seconds within which a process must reach its next step, and the heartbeat timeout of several processes.
TIMEOUT, HEARTBEAT = 300.0, 10


class TrialFailed(Exception):
    """A run did not behave as required."""


@dataclasses.dataclass
class TrialResult:
    """The result of a trial: repeated steps, seconds until the first new step, and a note."""

    lost: int = 0
    seconds: float | None = None
    note: str = ''


class Process(real_processes.Process):
    """A process that runs a command."""

    def __init__(self, command: Callable[[list[str]], int], argv: list[str], log: pathlib.Path, **kwargs):
        variables = {**os.environ, 'PYTHONPATH': paths.environment()['PYTHONPATH']}
        super().__init__(command, argv, output=log, environment=variables, **kwargs)

    def end(self, timeout: float = TIMEOUT) -> int:
        """Waits for the end, and returns the exit code, which is negative for a signal."""
        try:
            return self.wait(timeout)
        except AssertionError as error:
            raise TrialFailed(f'{str(error).splitlines()[0]}: {self.log}') from error

    def expect_exit(self, *codes: int, timeout: float = TIMEOUT) -> int:
        """Waits for the end, and raises TrialFailed unless the exit code is one of `codes`."""
        code = self.end(timeout)
        if code not in codes:
            raise TrialFailed(f'exit code {code} instead of {codes}: {self.log}')
        return code

    def error(self) -> str:
        """Returns the single error line of the output."""
        lines = [line for line in self.output().splitlines() if line.startswith('error')]
        if len(lines) != 1 or 'Traceback' in self.output():
            raise TrialFailed(f'{len(lines)} lines of error in {self.log}, which should contain one')
        return lines[0]


def without_autograph(argv: list[str]) -> int:
    """Runs a command without AutoGraph, which takes seconds at each start and which the tiny run does not need."""
    return tf.autograph.experimental.do_not_convert(main.main)(argv)


class Bench:
    """The command under test, the uninterrupted runs to compare with, and the folders of trials."""

    def __init__(
        self,
        folder: pathlib.Path,
        command: list[str],
        rng: random.Random,
        train_steps: int = TRAIN_STEPS,
        compiled: pathlib.Path | None = None,
    ):
        """`compiled` is a folder with compiled programs of earlier runs (default: a new folder)."""
        self.folder, self.rng, self.command = folder, rng, list(command)
        self._compiled = compiled or folder / 'compiled'
        self.is_default = not command
        self._numbers = itertools.count()
        if self.is_default:
            self.text = folder / 'a text\n%d {x} *.txt'
            topics = pydoc_data.topics.topics
            self.text.write_text('\n\n'.join(topics[name].strip() for name in sorted(topics)))
            self.command = [*TINY, f'--gin.FILES={str(self.text)!r}', f'--gin.TRAIN_STEPS={train_steps}']
        self._uninterrupted: dict[int, pathlib.Path] = {}
        self.last = 0

    def start(self, run: pathlib.Path | str, *flags: str, command: Callable | None = None, **kwargs) -> Process:
        log = self.folder / f'output_{next(self._numbers)}.txt'
        argv = [*self.command, f'--gin.MODEL_DIR={run}', *flags]
        command = command or (without_autograph if self.is_default else main.main)
        return Process(command, argv, log, compiled=self._compiled, **kwargs)

    def start_several(self, run: pathlib.Path, *flags: str, count: int = 2) -> list[Process]:
        address = f'localhost:{ports.reserve()}'
        join = [f'--coordinator_address={address}', f'--process_count={count}', f'--heartbeat_timeout={HEARTBEAT}']
        return [self.start(run, *join, *flags, f'--process_index={index}') for index in range(count)]

    def kill_at_random_step(self, run: pathlib.Path | str, **kwargs) -> int:
        process = self.start(run, **kwargs)
        reached = self.wait_for_step(pathlib.Path(run), process)
        process.send(signal.SIGKILL)
        process.end()
        return reached

    def expect_error(self, run: pathlib.Path, words: str, *flags: str, **kwargs) -> str:
        """Starts a process that must fail with an error line that contains `words`, and returns this line."""
        process = self.start(run, *flags, **kwargs)
        process.expect_exit(2)
        if words not in process.error():
            raise TrialFailed(f'no error with {words!r}: {process.log}')
        return process.error()

    def uninterrupted(self, processes: int = 1) -> pathlib.Path:
        """Returns the uninterrupted run, which the first call starts."""
        if processes not in self._uninterrupted:
            run = self.folder / f'uninterrupted_{processes}'
            started = [self.start(run)] if processes == 1 else self.start_several(run)
            codes = [process.end(10 * TIMEOUT) for process in started]
            if any(codes):
                raise SystemExit(f'error: the uninterrupted run ended with {codes}; see {started[0].log}')
            self._uninterrupted[processes] = run
            self.last = compare_runs.last_step(run)
        return self._uninterrupted[processes]

    def finish(
        self, run: pathlib.Path, *flags: str, reached: int, processes: int = 1, note: str = '', **kwargs
    ) -> TrialResult:
        """Restarts the command, waits for its end, and compares. `reached` is the last step before the fault."""
        before = compare_runs.checkpoint_steps(run)
        result = TrialResult(max(0, reached - (before[-1] if before else 0)), note=note)
        begun = time.time()
        started = [self.start(run, *flags, **kwargs)] if processes == 1 else self.start_several(run, *flags)
        result.seconds = _first_new_step(run, started[0], begun)
        codes = [process.end() for process in started]
        if any(codes):
            raise TrialFailed(f'the next start ended with {codes}: {started[0].log}')
        self.compare(run, processes)
        return result

    def compare(self, run: pathlib.Path, processes: int = 1) -> None:
        uninterrupted = self.uninterrupted(processes)
        if difference := compare_runs.difference(run, uninterrupted, self.last):
            raise TrialFailed(f'{run} differs from {uninterrupted} in {difference}')
        unfinished = [path.name for path in (run / 'checkpoints').iterdir() if not path.name.isdigit()]
        if unfinished:
            raise TrialFailed(f'{run / "checkpoints"} still contains {", ".join(unfinished)}')

    def wait_for_step(self, run: pathlib.Path, process: Process, max_steps: int = 60) -> int:
        """Waits for a random step within the next `max_steps`, and returns the last logged step."""
        self.uninterrupted()
        after = compare_runs.last_step(run)
        target = min(after + self.rng.randint(1, max_steps), self.last - 2)
        wait(lambda: compare_runs.last_step(run) >= target, process)
        time.sleep(0.05 * self.rng.random())
        return compare_runs.last_step(run)

    def wait_for_checkpoints(self, run: pathlib.Path, process: Process) -> int:
        """Waits for two checkpoints and a random step, and returns the last logged step."""
        wait(lambda: len(compare_runs.checkpoint_steps(run)) >= 2, process)
        return self.wait_for_step(run, process, 20)


def wait(condition: Callable[[], bool], process: Process, timeout: float = TIMEOUT) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        # Checks the condition again, because it may have become true just before the process ended.
        if not process.running and not condition():
            raise TrialFailed(f'ended early: {process.log}')
        if time.monotonic() > deadline:
            raise TrialFailed(f'nothing happened for {timeout:.0f} s: {process.log}')
        time.sleep(0.003)


def _first_new_step(run: pathlib.Path, process: Process, begun: float) -> float | None:
    path = pathlib.Path(run, 'metrics.jsonl')
    known = compare_runs.last_step(run)
    deadline = time.monotonic() + TIMEOUT
    while process.running and time.monotonic() < deadline:
        # At its start, a run removes the records after its checkpoint.
        now = compare_runs.last_step(run)
        if now < known:
            known = now
        elif now > known or (path.exists() and path.stat().st_mtime > begun and known == 0 and now > 0):
            return time.time() - begun
        time.sleep(0.005)
    return None


def is_writing_checkpoint(run: pathlib.Path) -> bool:
    path = pathlib.Path(run, 'checkpoints')
    return path.exists() and any(not child.name.isdigit() for child in path.iterdir())
