"""Runs a tiny pretraining in real processes, and compares the result with an uninterrupted run."""

import itertools
import os
import pathlib
import pydoc_data.topics
import random
import time
from collections.abc import Callable

from tests.support import command_without_autograph, compare_runs, feed_forward, paths, ports, real_processes

TINY = [
    *('train', '--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin_file=data/own_text.gin'),
    *('--gin_file=optimizers/adamw_rms.gin', '--gin_file=hardware/cpu.gin', '--gin_file=runs/pretrain.gin'),
    *('--gin.NUM_ENCODER_LAYERS=1', '--gin.NUM_DECODER_LAYERS=1', '--gin.EMBED_DIM=64', '--gin.MLP_DIM=128'),
    *('--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384', '--gin.BATCH_SIZE=12'),
    *("--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 24}", '--gin.CHECKPOINT_PERIOD=10'),
    *('--gin.WARMUP_STEPS=20', '--gin.LOG_PERIOD=1', '--gin.EVAL_PERIOD=40', '--gin.EVAL_STEPS=2'),
    *feed_forward.FLAGS,
]
TRAIN_STEPS = 60
# Heartbeat timeout of several processes in seconds.
HEARTBEAT = 10


class Process(real_processes.Process):
    """A process that runs a command."""

    def expect_exit(self, code: int) -> None:
        assert self.wait() == code, self.output()

    def error(self) -> str:
        """Returns the single error line of the output."""
        (line,) = [line for line in self.output().splitlines() if line.startswith('error')]
        assert 'Traceback' not in self.output(), self.output()
        return line


class Bench:
    """Starts runs in subfolders of `folder`, and compares them with uninterrupted runs."""

    def __init__(self, folder: pathlib.Path):
        seed = random.SystemRandom().randrange(10**6)
        print(f'seed {seed}')
        self.folder, self.rng = folder, random.Random(seed)
        self._numbers = itertools.count()
        self.text = folder / 'a text\n%d {x} *.txt'
        topics = pydoc_data.topics.topics
        self.text.write_text('\n\n'.join(topics[name].strip() for name in sorted(topics)))
        self._uninterrupted: dict[int, pathlib.Path] = {}

    def start(
        self, run: pathlib.Path, *flags: str, command: Callable[[list[str]], int] = command_without_autograph.main
    ) -> Process:
        variables = {**os.environ, 'PYTHONPATH': paths.environment()['PYTHONPATH']}
        argv = [*TINY, f'--gin.FILES={str(self.text)!r}', f'--gin.TRAIN_STEPS={TRAIN_STEPS}', f'--gin.MODEL_DIR={run}']
        log = self.folder / f'output_{next(self._numbers)}.txt'
        return Process(command, [*argv, *flags], output=log, environment=variables)

    def start_several(self, run: pathlib.Path, heartbeat: int = HEARTBEAT) -> list[Process]:
        address = f'localhost:{ports.reserve()}'
        join = [f'--coordinator_address={address}', '--process_count=2', f'--heartbeat_timeout={heartbeat}']
        return [self.start(run, *join, f'--process_index={index}') for index in (0, 1)]

    def kill_at_random_step(self, run: pathlib.Path, **kwargs) -> None:
        process = self.start(run, **kwargs)
        self.wait_for_step(run, process)
        process.kill()

    def expect_error(self, run: pathlib.Path, words: str, **kwargs) -> None:
        """Starts a process that must fail with an error line that contains `words`."""
        process = self.start(run, **kwargs)
        process.expect_exit(2)
        assert words in process.error()

    def uninterrupted(self, processes: int = 1) -> pathlib.Path:
        """Returns the uninterrupted run, which the first call starts."""
        if processes not in self._uninterrupted:
            run = self.folder / f'uninterrupted_{processes}'
            self._run_to_end(run, processes)
            self._uninterrupted[processes] = run
        return self._uninterrupted[processes]

    def _run_to_end(self, run: pathlib.Path, processes: int, **kwargs) -> None:
        for process in [self.start(run, **kwargs)] if processes == 1 else self.start_several(run):
            process.expect_exit(0)

    def finish(self, run: pathlib.Path, processes: int = 1, **kwargs) -> None:
        """Starts the command again, waits for its end, and compares the result."""
        self._run_to_end(run, processes, **kwargs)
        self.compare(run, processes)

    def compare(self, run: pathlib.Path, processes: int = 1) -> None:
        assert compare_runs.difference(run, self.uninterrupted(processes), TRAIN_STEPS) is None
        assert not is_writing_checkpoint(run)

    def wait_for_step(self, run: pathlib.Path, process: Process, max_steps: int = TRAIN_STEPS) -> None:
        """Waits for a random step within the next `max_steps`."""
        target = min(compare_runs.last_step(run) + self.rng.randint(1, max_steps), TRAIN_STEPS - 2)
        process.wait_until(lambda: compare_runs.last_step(run) >= target)
        time.sleep(0.05 * self.rng.random())

    def wait_for_checkpoints(self, run: pathlib.Path, process: Process) -> None:
        """Waits for two checkpoints and a random step."""
        process.wait_until(lambda: len(compare_runs.checkpoint_steps(run)) >= 2)
        self.wait_for_step(run, process, 20)


def is_writing_checkpoint(run: pathlib.Path) -> bool:
    path = run / 'checkpoints'
    return path.exists() and any(not child.name.isdigit() for child in path.iterdir())
