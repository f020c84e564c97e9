"""Real processes of the command line for faults.py: started, watched, and compared with an unbroken run."""

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
# Seconds: for one start to reach its next step, and after which a process of several counts as lost.
PATIENCE, HEARTBEAT = 300.0, 10


class Failed(Exception):
    """A run did not do what it must."""


@dataclasses.dataclass
class Told:
    """What a trial found: steps done twice, seconds until the first new step, and what to remember."""

    lost: int = 0
    seconds: float | None = None
    note: str = ''


class Process(real_processes.Process):
    """One real process of the command line."""

    def __init__(self, command: Callable[[list[str]], int], argv: list[str], log: pathlib.Path, **kwargs):
        variables = {**os.environ, 'PYTHONPATH': paths.environment()['PYTHONPATH']}
        super().__init__(command, argv, output=log, environment=variables, **kwargs)

    def end(self, patience: float = PATIENCE) -> int:
        """The exit code, negative for a signal."""
        try:
            return self.wait(patience)
        except AssertionError as error:
            raise Failed(f'{str(error).splitlines()[0]}: {self.log}') from error

    def error(self) -> str:
        """Its one line about a mistake."""
        lines = [line for line in self.output().splitlines() if line.startswith('error')]
        if len(lines) != 1 or 'Traceback' in self.output():
            raise Failed(f'{len(lines)} lines of error in {self.log}, which should have one')
        return lines[0]


def without_autograph(argv: list[str]) -> int:
    """AutoGraph takes seconds of each start to rewrite functions of seqio; the tiny pretraining needs none of it."""
    return tf.autograph.experimental.do_not_convert(main.main)(argv)


class Bench:
    """The command under test, the unbroken runs it is compared with, and the folders of trials."""

    def __init__(
        self,
        folder: pathlib.Path,
        command: list[str],
        chance: random.Random,
        train_steps: int = TRAIN_STEPS,
        compiled: pathlib.Path | None = None,
    ):
        """`compiled`: a folder with compiled programs of earlier runs; None makes a new one."""
        self.folder, self.chance, self.command = folder, chance, list(command)
        self._compiled = compiled or folder / 'compiled'
        self.own = not command
        self._numbers = itertools.count()
        if self.own:
            self.text = folder / 'a text\n%d {x} *.txt'
            topics = pydoc_data.topics.topics
            self.text.write_text('\n\n'.join(topics[name].strip() for name in sorted(topics)))
            self.command = [*TINY, f'--gin.FILES={str(self.text)!r}', f'--gin.TRAIN_STEPS={train_steps}']
        self._unbroken: dict[int, pathlib.Path] = {}
        self.last = 0

    def start(self, run: pathlib.Path | str, *more: str, command: Callable | None = None, **kwargs) -> Process:
        log = self.folder / f'output_{next(self._numbers)}.txt'
        argv = [*self.command, f'--gin.MODEL_DIR={run}', *more]
        command = command or (without_autograph if self.own else main.main)
        return Process(command, argv, log, compiled=self._compiled, **kwargs)

    def start_several(self, run: pathlib.Path, *more: str, count: int = 2) -> list[Process]:
        address = f'localhost:{ports.reserve()}'
        flags = [f'--coordinator_address={address}', f'--process_count={count}', f'--heartbeat_timeout={HEARTBEAT}']
        return [self.start(run, *flags, *more, f'--process_index={index}') for index in range(count)]

    def kill_at_some_step(self, run: pathlib.Path | str, **kwargs) -> int:
        process = self.start(run, **kwargs)
        reached = self.some_step(pathlib.Path(run), process)
        process.send(signal.SIGKILL)
        process.end()
        return reached

    def refused(self, run: pathlib.Path, words: str, *more: str, **kwargs) -> str:
        """The one line of a start that must be refused with a line that contains `words`."""
        process = self.start(run, *more, **kwargs)
        if process.end() != 2 or words not in process.error():
            raise Failed(f'not refused with {words!r}: {process.log}')
        return process.error()

    def unbroken(self, processes: int = 1) -> pathlib.Path:
        """The run that nothing broke, made when first asked for."""
        if processes not in self._unbroken:
            run = self.folder / f'unbroken_{processes}'
            started = [self.start(run)] if processes == 1 else self.start_several(run)
            codes = [process.end(10 * PATIENCE) for process in started]
            if any(codes):
                raise SystemExit(f'error: the unbroken run ended with {codes}; see {started[0].log}')
            self._unbroken[processes] = run
            self.last = compare_runs.last_step(run)
        return self._unbroken[processes]

    def finish(self, run: pathlib.Path, *more: str, reached: int, processes: int = 1, note: str = '', **kwargs) -> Told:
        """Starts the command again, waits for its end, and compares. `reached`: the step when the fault came."""
        before = compare_runs.checkpoint_steps(run)
        told = Told(max(0, reached - (before[-1] if before else 0)), note=note)
        begun = time.time()
        started = [self.start(run, *more, **kwargs)] if processes == 1 else self.start_several(run, *more)
        told.seconds = _first_new_step(run, started[0], begun)
        codes = [process.end() for process in started]
        if any(codes):
            raise Failed(f'the next start ended with {codes}: {started[0].log}')
        self.compare(run, processes)
        return told

    def compare(self, run: pathlib.Path, processes: int = 1) -> None:
        unbroken = self.unbroken(processes)
        found = compare_runs.difference(run, unbroken, self.last)
        if found:
            raise Failed(f'{run} differs from {unbroken} in {found}')
        left = [path.name for path in (run / 'checkpoints').iterdir() if not path.name.isdigit()]
        if left:
            raise Failed(f'{run / "checkpoints"} still has {", ".join(left)}')

    def some_step(self, run: pathlib.Path, process: Process, most: int = 60) -> int:
        """Waits for a step within the next `most`, and a little longer; the step then."""
        self.unbroken()
        after = compare_runs.last_step(run)
        wanted = min(after + self.chance.randint(1, most), self.last - 2)
        wait(lambda: compare_runs.last_step(run) >= wanted, process)
        time.sleep(0.05 * self.chance.random())
        return compare_runs.last_step(run)

    def some_checkpoint(self, run: pathlib.Path, process: Process) -> int:
        """As `some_step`, once there are two checkpoints to continue from."""
        wait(lambda: len(compare_runs.checkpoint_steps(run)) >= 2, process)
        return self.some_step(run, process, 20)


def wait(condition: Callable[[], bool], process: Process, patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not condition():
        # Asked once more: what was waited for may have been its last act.
        if not process.running and not condition():
            raise Failed(f'ended before its time: {process.log}')
        if time.monotonic() > until:
            raise Failed(f'nothing happened for {patience:.0f} s: {process.log}')
        time.sleep(0.003)


def _first_new_step(run: pathlib.Path, process: Process, begun: float) -> float | None:
    path = pathlib.Path(run, 'metrics.jsonl')
    known = compare_runs.last_step(run)
    until = time.monotonic() + PATIENCE
    while process.running and time.monotonic() < until:
        # The log is cut back to the checkpoint's step before the first new line comes.
        now = compare_runs.last_step(run)
        if now < known:
            known = now
        elif now > known or (path.exists() and path.stat().st_mtime > begun and known == 0 and now > 0):
            return time.time() - begun
        time.sleep(0.005)
    return None


def writing(run: pathlib.Path) -> bool:
    path = pathlib.Path(run, 'checkpoints')
    return path.exists() and any(not child.name.isdigit() for child in path.iterdir())
