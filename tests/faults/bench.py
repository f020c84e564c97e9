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

from remixer_t5x.cli import main
from tests.support import (
    command_without_autograph,
    compare_runs,
    feed_forward,
    paths,
    ports,
    program_cache,
    real_processes,
)

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
# Heartbeat timeout of several processes in seconds.
HEARTBEAT = 10


@dataclasses.dataclass
class TrialResult:
    """The result of a trial: repeated steps, and a note."""

    lost: int = 0
    note: str = ''


class Process(real_processes.Process):
    """A process that runs a command."""

    def expect_exit(self, *codes: int) -> int:
        """Waits for the end, and raises AssertionError unless the exit code is one of `codes`."""
        code = self.wait()
        assert code in codes, f'exit code {code} instead of {codes}: {self.log}'
        return code

    def error(self) -> str:
        """Returns the single error line of the output."""
        lines = [line for line in self.output().splitlines() if line.startswith('error')]
        assert len(lines) == 1 and 'Traceback' not in self.output(), f'not one line of error in {self.log}'
        return lines[0]


class Bench:
    """The command under test, the uninterrupted runs to compare with, and the folders of trials.

    The trials share the compilation cache of this process; if it has none, they share one in `folder`.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        command: list[str],
        rng: random.Random,
        train_steps: int = TRAIN_STEPS,
    ):
        self.folder, self.rng, self.command = folder, rng, list(command)
        if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
            program_cache.enable_cache(str(folder / 'compiled'))
        self.is_default = not command
        self._numbers = itertools.count()
        if self.is_default:
            self.text = folder / 'a text\n%d {x} *.txt'
            topics = pydoc_data.topics.topics
            self.text.write_text('\n\n'.join(topics[name].strip() for name in sorted(topics)))
            self.command = [*TINY, f'--gin.FILES={str(self.text)!r}', f'--gin.TRAIN_STEPS={train_steps}']
        self._uninterrupted: dict[int, pathlib.Path] = {}
        self.last = 0

    def start(self, run: pathlib.Path, *flags: str, command: Callable | None = None, **kwargs) -> Process:
        # The tiny run does not need AutoGraph, which takes seconds at each start.
        command = command or (command_without_autograph.main if self.is_default else main.main)
        variables = {**os.environ, 'PYTHONPATH': paths.environment()['PYTHONPATH']}
        log = self.folder / f'output_{next(self._numbers)}.txt'
        argv = [*self.command, f'--gin.MODEL_DIR={run}', *flags]
        return Process(command, argv, output=log, environment=variables, **kwargs)

    def start_several(self, run: pathlib.Path, *flags: str, count: int = 2) -> list[Process]:
        address = f'localhost:{ports.reserve()}'
        join = [f'--coordinator_address={address}', f'--process_count={count}', f'--heartbeat_timeout={HEARTBEAT}']
        return [self.start(run, *join, *flags, f'--process_index={index}') for index in range(count)]

    def kill_at_random_step(self, run: pathlib.Path, **kwargs) -> int:
        process = self.start(run, **kwargs)
        reached = self.wait_for_step(run, process)
        process.kill()
        return reached

    def expect_error(self, run: pathlib.Path, words: str, *flags: str, **kwargs) -> str:
        """Starts a process that must fail with an error line that contains `words`, and returns this line."""
        process = self.start(run, *flags, **kwargs)
        process.expect_exit(2)
        assert words in process.error(), f'no error with {words!r}: {process.log}'
        return process.error()

    def uninterrupted(self, processes: int = 1) -> pathlib.Path:
        """Returns the uninterrupted run, which the first call starts."""
        if processes not in self._uninterrupted:
            run = self.folder / f'uninterrupted_{processes}'
            self._run_to_end(run, processes)
            self._uninterrupted[processes] = run
            self.last = compare_runs.last_step(run)
        return self._uninterrupted[processes]

    def _run_to_end(self, run: pathlib.Path, processes: int, *flags: str, **kwargs) -> None:
        started = [self.start(run, *flags, **kwargs)] if processes == 1 else self.start_several(run, *flags)
        for process in started:
            process.expect_exit(0)

    def finish(
        self, run: pathlib.Path, *flags: str, reached: int, processes: int = 1, note: str = '', **kwargs
    ) -> TrialResult:
        """Restarts the command, waits for its end, and compares. `reached` is the last step before the fault."""
        before = compare_runs.checkpoint_steps(run)
        self._run_to_end(run, processes, *flags, **kwargs)
        self.compare(run, processes)
        return TrialResult(max(0, reached - (before[-1] if before else 0)), note)

    def compare(self, run: pathlib.Path, processes: int = 1) -> None:
        uninterrupted = self.uninterrupted(processes)
        difference = compare_runs.difference(run, uninterrupted, self.last)
        assert difference is None, f'{run} differs from {uninterrupted} in {difference}'
        assert not is_writing_checkpoint(run), f'{run / "checkpoints"} still contains unfinished checkpoints'

    def wait_for_step(self, run: pathlib.Path, process: Process, max_steps: int = 60) -> int:
        """Waits for a random step within the next `max_steps`, and returns the last logged step."""
        self.uninterrupted()
        target = min(compare_runs.last_step(run) + self.rng.randint(1, max_steps), self.last - 2)
        process.wait_until(lambda: compare_runs.last_step(run) >= target)
        time.sleep(0.05 * self.rng.random())
        return compare_runs.last_step(run)

    def wait_for_checkpoints(self, run: pathlib.Path, process: Process) -> int:
        """Waits for two checkpoints and a random step, and returns the last logged step."""
        process.wait_until(lambda: len(compare_runs.checkpoint_steps(run)) >= 2)
        return self.wait_for_step(run, process, 20)

    def stop_after_checkpoints(self, run: pathlib.Path) -> int:
        """Runs until there are at least two checkpoints, stops the run, and returns its last checkpoint."""
        process = self.start(run)
        self.wait_for_checkpoints(run, process)
        process.send(signal.SIGTERM)
        process.expect_exit(0, 128 + signal.SIGTERM)
        return compare_runs.checkpoint_steps(run)[-1]


def is_writing_checkpoint(run: pathlib.Path) -> bool:
    path = run / 'checkpoints'
    return path.exists() and any(not child.name.isdigit() for child in path.iterdir())
