"""Breaks training runs in every way that machines and people break them, starts the same command again, and compares
with a run that nothing broke: parameters, optimizer, every step's loss and the place in the data must be bit-equal.

    python scripts/faults.py                               every fault once
    python scripts/faults.py --trials 200 --only kill      as often as you like
    python scripts/faults.py --long                        200 kills, three trials of each other fault
    python scripts/faults.py -- train --gin_file=my.gin    your own run; it should take a minute or two

Runs are real processes of the command line, forked from one that has imported everything. Each trial is printed, and
written to results.jsonl in the folder, with what the run said; a table comes at the end. Exit code 1 where one failed.
MODEL_DIR is set here; checkpoints should be frequent and LOG_PERIOD be 1 (`--gin.LOG_PERIOD=1`), so that every step is
compared. Needs Linux; a read-only file system needs root, without it a folder without write permission takes its place.
"""

import argparse
import collections
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import pathlib
import pydoc_data.topics
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from remixer_t5x.cli import quiet
from remixer_t5x.runtime import compare_runs

TRAIN_STEPS = 120
TINY = [
    *('train', '--gin_file=models/t5_1_1.gin', '--gin_file=sizes/tiny.gin', '--gin_file=data/own_text.gin'),
    *('--gin_file=optimizers/adamw_rms.gin', '--gin_file=hardware/cpu.gin', '--gin_file=runs/pretrain.gin'),
    *('--gin.NUM_ENCODER_LAYERS=1', '--gin.NUM_DECODER_LAYERS=1', '--gin.EMBED_DIM=64', '--gin.MLP_DIM=128'),
    *('--gin.VOCABULARY=@vocabularies.byte()', '--gin.VOCAB_SIZE=384', '--gin.BATCH_SIZE=8'),
    *("--gin.TASK_FEATURE_LENGTHS={'inputs': 64, 'targets': 24}", f'--gin.TRAIN_STEPS={TRAIN_STEPS}'),
    *('--gin.WARMUP_STEPS=20', '--gin.LOG_PERIOD=1', '--gin.EVAL_PERIOD=40', '--gin.EVAL_STEPS=2'),
    '--gin.CHECKPOINT_PERIOD=10',
]
LONG_KILLS, LONG_OTHERS = 200, 3
# Seconds: for one start to reach its next step, and after which a process of several counts as lost.
PATIENCE, HEARTBEAT = 300.0, 10
# A kill that was meant for a checkpoint's write and came after it.
OUTSIDE = 'outside of a write'
IMPORTED_ONCE = ['remixer_t5x.cli.main', 'remixer_t5x.cli.train', 'remixer_t5x.cli.gin_config', 'tensorboardX']


class Failed(Exception):
    """A run did not do what it must."""


@dataclasses.dataclass
class Told:
    """What a trial found: steps done twice, seconds until the first new step, and what to remember."""

    lost: int = 0
    seconds: float | None = None
    note: str = ''


class Process:
    """One real process of the command line."""

    def __init__(self, argv: list[str], log: pathlib.Path, clock_shift: float = 0.0):
        self.log, self.begun = log, time.time()
        self._process = _CONTEXT.Process(target=_child, args=(argv, str(log), os.getcwd(), clock_shift), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self, patience: float = PATIENCE) -> int:
        """The exit code, negative for a signal."""
        self._process.join(patience)
        if self._process.exitcode is None:
            self.send(signal.SIGKILL)
            self._process.join()
            raise Failed(f'still running after {patience:.0f} s')
        return self._process.exitcode

    def output(self) -> str:
        return self.log.read_text(errors='replace') if self.log.exists() else ''

    def error(self) -> str:
        """Its one line about a mistake."""
        lines = [line for line in self.output().splitlines() if line.startswith('error')]
        if len(lines) != 1 or 'Traceback' in self.output():
            raise Failed(f'{len(lines)} lines of error in {self.log}, which should have one')
        return lines[0]


_CONTEXT = multiprocessing.get_context('forkserver')


def _child(argv: list[str], log: str, folder: str, clock_shift: float) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    if clock_shift:
        real, nanoseconds = time.time, time.time_ns
        time.time = lambda: real() + clock_shift
        time.time_ns = lambda: nanoseconds() + int(1e9 * clock_shift)
    from remixer_t5x.cli import main

    code = 1
    try:
        code = main.main(argv)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Bench:
    """The command under test, the unbroken runs it is compared with, and the folders of trials."""

    def __init__(self, folder: pathlib.Path, command: list[str], chance: random.Random):
        self.folder, self.chance, self.command = folder, chance, list(command)
        self.own = not command
        self._numbers = itertools.count()
        if self.own:
            self.text = folder / 'text.txt'
            topics = pydoc_data.topics.topics
            self.text.write_text('\n\n'.join(topics[name].strip() for name in sorted(topics)))
            self.command = [*TINY, f'--gin.FILES={self.text}']
        self._unbroken: dict[int, pathlib.Path] = {}
        self.last = 0

    def start(self, run: pathlib.Path | str, *more: str, **kwargs) -> Process:
        log = self.folder / f'output_{next(self._numbers)}.txt'
        return Process([*self.command, f'--gin.MODEL_DIR={run}', *more], log, **kwargs)

    def start_two(self, run: pathlib.Path, *more: str) -> list[Process]:
        address = f'localhost:{_free_port()}'
        flags = [f'--coordinator_address={address}', '--process_count=2', f'--heartbeat_timeout={HEARTBEAT}', *more]
        return [self.start(run, *flags, f'--process_index={index}') for index in range(2)]

    def unbroken(self, processes: int = 1) -> pathlib.Path:
        """The run that nothing broke, made when first asked for."""
        if processes not in self._unbroken:
            run = self.folder / f'unbroken_{processes}'
            started = [self.start(run)] if processes == 1 else self.start_two(run)
            codes = [process.end(10 * PATIENCE) for process in started]
            if any(codes):
                raise SystemExit(f'error: the unbroken run ended with {codes}; see {started[0].log}')
            self._unbroken[processes] = run
            self.last = compare_runs.last_step(run)
        return self._unbroken[processes]

    def finish(self, run: pathlib.Path, *more: str, reached: int, processes: int = 1, **kwargs) -> Told:
        """Starts the command again, waits for its end, and compares. `reached`: the step when the fault came."""
        before = compare_runs.checkpoint_steps(run)
        told = Told(lost=max(0, reached - (before[-1] if before else 0)))
        begun = time.time()
        started = [self.start(run, *more, **kwargs)] if processes == 1 else self.start_two(run, *more)
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
        _wait(lambda: compare_runs.last_step(run) >= wanted, process)
        time.sleep(0.05 * self.chance.random())
        return compare_runs.last_step(run)

    def some_checkpoint(self, run: pathlib.Path, process: Process) -> int:
        """As `some_step`, once there are two checkpoints to go on from."""
        _wait(lambda: len(compare_runs.checkpoint_steps(run)) >= 2, process)
        return self.some_step(run, process, 20)


def _wait(condition: Callable[[], bool], process: Process, patience: float = PATIENCE) -> None:
    until = time.monotonic() + patience
    while not condition():
        if not process.running:
            raise Failed(f'ended before its time: {process.log}')
        if time.monotonic() > until:
            raise Failed(f'nothing happened for {patience:.0f} s: {process.log}')
        time.sleep(0.001)


def _first_new_step(run: pathlib.Path, process: Process, begun: float) -> float | None:
    path = pathlib.Path(run, 'metrics.jsonl')
    known = compare_runs.last_step(run)
    while process.running:
        # The log is cut back to the checkpoint's step before the first new line comes.
        now = compare_runs.last_step(run)
        if now < known:
            known = now
        elif now > known or (path.exists() and path.stat().st_mtime > begun and known == 0 and now > 0):
            return time.time() - begun
        time.sleep(0.005)
    return None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(('localhost', 0))
        return listener.getsockname()[1]


def _writing(run: pathlib.Path) -> bool:
    path = pathlib.Path(run, 'checkpoints')
    return path.exists() and any(not child.name.isdigit() for child in path.iterdir())


# One function a fault: breaks a run in the folder it is given and returns what it found. Several kills break the same
# run one after the other, so they are generators.


def kill(bench: Bench, run: pathlib.Path, in_write: bool = False) -> Iterator[Told]:
    """SIGKILL at a random moment; with `in_write`, while a checkpoint is written. Ends when the run has."""
    while (told := _kill_once(bench, run, in_write)) is not None:
        if told.note != OUTSIDE:
            yield told
    bench.compare(run)


def _kill_once(bench: Bench, run: pathlib.Path, in_write: bool) -> Told | None:
    """One start and its end; None where the run came to its end before."""
    process, begun = bench.start(run), time.time()
    told = Told()
    try:
        _wait(lambda: 'the first step compiles' in process.output(), process)
        # By now the log ends at the checkpoint's step.
        resumed = compare_runs.last_step(run)
        _wait(lambda: compare_runs.last_step(run) > resumed, process)
        told.seconds = time.time() - begun
        if in_write:
            # First what the last kill left behind has to go; then a write or two may be whole.
            for _ in range(bench.chance.randint(1, 3)):
                _wait(lambda: not _writing(run), process)
                _wait(lambda: _writing(run), process)
            time.sleep(0.08 * bench.chance.random())
        else:
            wanted = resumed + bench.chance.randint(1, 40)
            _wait(lambda: compare_runs.last_step(run) >= wanted, process)
            time.sleep(0.05 * bench.chance.random())
    except Failed:
        if process.running or process.end() != 0:
            raise
    process.send(signal.SIGKILL)
    code, reached = process.end(), compare_runs.last_step(run)
    if code == 0:
        return None
    kept = compare_runs.checkpoint_steps(run)
    told.lost = max(0, reached - (kept[-1] if kept else 0))
    if in_write and not _writing(run):
        told.note = OUTSIDE
    return told


def kill_in_write(bench: Bench, run: pathlib.Path) -> Iterator[Told]:
    """SIGKILL while a checkpoint is written: an unfinished folder is left behind."""
    return kill(bench, run, in_write=True)


def sigterm(bench: Bench, run: pathlib.Path, number: int = signal.SIGTERM) -> Told:
    """One SIGTERM: saves the step under way."""
    process = bench.start(run)
    bench.some_step(run, process)
    process.send(number)
    code, reached = process.end(), compare_runs.last_step(run)
    if code != 128 + number or 'saved at step' not in process.output():
        raise Failed(f'exit code {code}: {process.log}')
    saved = compare_runs.checkpoint_steps(run)[-1]
    if saved < reached:
        raise Failed(f'saved step {saved}, but step {reached} was done')
    return bench.finish(run, reached=reached)


def sigint(bench: Bench, run: pathlib.Path) -> Told:
    """One SIGINT (Ctrl-C): saves the step under way."""
    return sigterm(bench, run, signal.SIGINT)


def signal_twice(bench: Bench, run: pathlib.Path) -> Told:
    """SIGTERM and SIGINT together: leaves at once."""
    process = bench.start(run)
    reached = bench.some_checkpoint(run, process)
    # Stopped, so that both wait for it.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send(number)
    begun = time.monotonic()
    code = process.end()
    if code not in (128 + signal.SIGTERM, 128 + signal.SIGINT):
        raise Failed(f'exit code {code}: {process.log}')
    told = bench.finish(run, reached=reached)
    told.note = f'left in {time.monotonic() - begun:.1f} s' if told.seconds is None else ''
    return told


def full_disk(bench: Bench, run: pathlib.Path) -> Told:
    """No file may grow beyond half of a checkpoint's largest: one line, and the last checkpoint stays."""
    process = bench.start(run)
    bench.some_checkpoint(run, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_small(bench), _small(bench)))
    code, reached = process.end(), compare_runs.last_step(run)
    error = process.error()
    if code != 2 or 'could not be written' not in error:
        raise Failed(f'exit code {code}, {error}')
    told = bench.finish(run, reached=reached)
    told.note = error
    return told


def full_disk_for_a_while(bench: Bench, run: pathlib.Path) -> Told:
    """As above for one checkpoint, with ON_SAVE_FAILURE = 'go_on': nothing is started again."""
    process = bench.start(run, '--gin.ON_SAVE_FAILURE=go_on')
    bench.some_checkpoint(run, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_small(bench), resource.RLIM_INFINITY))
    _wait(lambda: 'training goes on' in process.output(), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if process.end() != 0:
        raise Failed(f'it stopped: {process.log}')
    bench.compare(run)
    return Told()


def read_only(bench: Bench, run: pathlib.Path) -> Told:
    """MODEL_DIR turns read-only: one line."""
    process = bench.start(run)
    bench.some_checkpoint(run, process)
    with _read_only(run):
        code, reached = process.end(), compare_runs.last_step(run)
        again = bench.start(run)
        if again.end() != 2 or 'cannot be written' not in again.error():
            raise Failed(f'a start in a read-only folder: {again.log}')
    if code != 2:
        raise Failed(f'exit code {code}: {process.log}')
    note = process.error()
    told = bench.finish(run, reached=reached)
    told.note = note
    return told


def _stopped(bench: Bench, run: pathlib.Path) -> None:
    """A run that was told to stop at some step, with at least two checkpoints."""
    process = bench.start(run)
    bench.some_checkpoint(run, process)
    process.send(signal.SIGTERM)
    process.end()


def damaged(bench: Bench, run: pathlib.Path, how: str = '') -> Told:
    """A file of the newest checkpoint is cut, has a flipped bit or is gone: refused, and the one before when asked."""
    _stopped(bench, run)
    steps = compare_runs.checkpoint_steps(run)
    files = [path for path in (run / 'checkpoints' / str(steps[-1])).rglob('*') if path.is_file()]
    path = bench.chance.choice([path for path in files if path.stat().st_size])
    how = how or bench.chance.choice(['cut', 'flipped', 'missing'])
    _damage(path, how, bench.chance)
    refused = bench.start(run)
    if refused.end() != 2 or path.name not in refused.error():
        raise Failed(f'{how} {path} was not refused: {refused.log}')
    told = bench.finish(run, '--restore=previous', reached=steps[-1])
    told.lost = steps[-1] - steps[-2]
    return told


def _damage(path: pathlib.Path, how: str, chance: random.Random) -> None:
    content = path.read_bytes()
    at = chance.randrange(len(content))
    if how == 'missing':
        path.unlink()
    elif how == 'cut':
        path.write_bytes(content[:at])
    else:
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :])


def not_finite(bench: Bench, run: pathlib.Path) -> Told:
    """Started again with an infinite learning rate: stops, and no checkpoint with such numbers is left."""
    _stopped(bench, run)
    kept = compare_runs.checkpoint_steps(run)
    stopped = bench.start(run, '--gin.LEARNING_RATE=1e38')
    if stopped.end() != 2 or 'not finite' not in stopped.error():
        raise Failed(f'it went on: {stopped.log}')
    if compare_runs.checkpoint_steps(run) != kept:
        raise Failed('another checkpoint was written')
    return bench.finish(run, reached=kept[-1])


def changed(bench: Bench, run: pathlib.Path) -> Told:
    """Batch size, model, vocabulary, seed or data changed: refused, and the same command as before goes on."""
    _stopped(bench, run)
    kept = compare_runs.checkpoint_steps(run)
    flags = {'BATCH_SIZE': '--gin.BATCH_SIZE=16', 'SEED': '--gin.SEED=7', 'shape': '--gin.EMBED_DIM=32'}
    if bench.own:
        flags['vocabulary'] = '--gin.VOCABULARY=@vocabularies.trained()'
    for word, flag in flags.items():
        refused = bench.start(run, flag)
        if refused.end() != 2 or word not in refused.error():
            raise Failed(f'{flag} was not refused: {refused.log}')
    if bench.own:
        text = bench.text.read_text()
        bench.text.write_text(text + '\n\nOne more paragraph.\n')
        refused = bench.start(run)
        code = refused.end()
        bench.text.write_text(text)
        if code != 2 or 'the data has changed' not in refused.error():
            raise Failed(f'other data were not refused: {refused.log}')
    return bench.finish(run, reached=kept[-1])


def host_killed(bench: Bench, run: pathlib.Path) -> Told:
    """One of two processes is killed: the other one ends by itself and says why."""
    bench.unbroken(2)
    both = bench.start_two(run)
    bench.some_step(run, both[0])
    victim = bench.chance.randrange(2)
    both[victim].send(signal.SIGKILL)
    begun = time.monotonic()
    both[victim].end()
    code, reached = both[1 - victim].end(), compare_runs.last_step(run)
    waited = time.monotonic() - begun
    text = both[1 - victim].error()
    if code != 75 or waited > 3 * HEARTBEAT:
        raise Failed(f'the other one ended with {code} after {waited:.0f} s: {text}')
    told = bench.finish(run, reached=reached, processes=2)
    told.note = f'the other one left after {waited:.1f} s of {HEARTBEAT}: {text}'
    return told


def host_slow(bench: Bench, run: pathlib.Path) -> Told:
    """One of two processes stands still for half of the heartbeat time: the run goes on."""
    bench.unbroken(2)
    both = bench.start_two(run)
    bench.some_step(run, both[0])
    slow = bench.chance.choice(both)
    slow.send(signal.SIGSTOP)
    time.sleep(HEARTBEAT / 2)
    slow.send(signal.SIGCONT)
    codes = [process.end() for process in both]
    if any(codes):
        raise Failed(f'it ended with {codes}: {both[0].log}')
    bench.compare(run, 2)
    return Told()


def host_never_comes(bench: Bench, run: pathlib.Path) -> Told:
    """One of two processes is never started: the other one ends in the time it was given."""
    flags = (f'--coordinator_address=localhost:{_free_port()}', '--process_count=2', '--initialization_timeout=10')
    alone = bench.start(run, *flags, f'--process_index={bench.chance.randrange(2)}')
    begun = time.monotonic()
    code = alone.end(90)
    if code != 75:
        raise Failed(f'exit code {code}: {alone.log}')
    waited, note = time.monotonic() - begun, alone.error()
    told = bench.finish(run, reached=0)
    told.note = f'left after {waited:.1f} s: {note}'
    return told


def two_runs(bench: Bench, run: pathlib.Path) -> Told:
    """A second run in the same MODEL_DIR is refused, and the first one does not notice."""
    first = bench.start(run)
    bench.some_step(run, first, 5)
    first.send(signal.SIGSTOP)
    second = bench.start(run)
    try:
        if second.end() != 2 or 'in use by process' not in second.error():
            raise Failed(f'the second run was not refused: {second.log}')
    finally:
        first.send(signal.SIGCONT)
    if first.end() != 0:
        raise Failed(f'the first run ended: {first.log}')
    bench.compare(run)
    return Told()


def odd_folder(bench: Bench, run: pathlib.Path) -> Told:
    """MODEL_DIR is relative, has a space and other alphabets, and is a link."""
    real = run.with_name(f'{run.name} réel 模型')
    real.mkdir()
    run.symlink_to(real, target_is_directory=True)
    process = bench.start(os.path.relpath(run))
    bench.some_step(run, process)
    process.send(signal.SIGKILL)
    process.end()
    told = bench.finish(run, reached=compare_runs.last_step(run))
    run.unlink()
    real.rename(run)
    return told


def clock_set_back(bench: Bench, run: pathlib.Path) -> Told:
    """Killed, and started again a month earlier, as Python's clock has it."""
    process = bench.start(run)
    reached = bench.some_step(run, process)
    process.send(signal.SIGKILL)
    process.end()
    return bench.finish(run, reached=reached, clock_shift=-30 * 86400.0)


FAULTS = {
    fault.__name__: fault
    for fault in (
        *(kill, kill_in_write, sigterm, sigint, signal_twice, full_disk, full_disk_for_a_while, read_only, damaged),
        *(not_finite, changed, host_killed, host_slow, host_never_comes, two_runs, odd_folder, clock_set_back),
    )
}
KILLS = ('kill', 'kill_in_write')


def _small(bench: Bench) -> int:
    files = pathlib.Path(bench.unbroken(), 'checkpoints').rglob('*')
    return max(path.stat().st_size for path in files if path.is_file()) // 2


@contextlib.contextmanager
def _read_only(folder: pathlib.Path) -> Iterator[None]:
    if os.geteuid() != 0:
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
        return
    subprocess.run(['mount', '--bind', str(folder), str(folder)], check=True)
    try:
        subprocess.run(['mount', '-o', 'remount,ro,bind', str(folder)], check=True)
        yield
    finally:
        subprocess.run(['umount', '--lazy', str(folder)], check=True)


def trials(bench: Bench, name: str, count: int) -> Iterator[Told | Failed]:
    """`count` trials of the fault; each folder is removed once its runs were as they must be."""
    done = 0
    bench.unbroken()
    while done < count:
        run = bench.folder / f'{name}_{done}'
        try:
            if name in KILLS:
                for told in itertools.islice(FAULTS[name](bench, run), count - done):
                    done += 1
                    yield told
                if done == count and compare_runs.last_step(run) < bench.last:
                    # The last one's run goes to its end as well.
                    bench.finish(run, reached=compare_runs.last_step(run))
            else:
                done += 1
                yield FAULTS[name](bench, run)
            shutil.rmtree(run, ignore_errors=True)
        except Failed as failure:
            done += name in KILLS
            yield failure


def main() -> int:
    args = _arguments()
    quiet.hush()
    folder = pathlib.Path(args.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob('unbroken_*')):
        print(f'error: {folder} holds other trials; give a new --folder', file=sys.stderr)
        return 2
    # Every start compiles the same programs.
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(folder / 'compiled'))
    os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    _CONTEXT.set_forkserver_preload(IMPORTED_ONCE)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f'seed {seed}; runs and their output in {folder}')
    bench = Bench(folder, args.command, random.Random(seed))
    found: dict[str, list[Told | Failed]] = collections.defaultdict(list)
    for name in args.only or FAULTS:
        count = (LONG_KILLS // 2 if name in KILLS else LONG_OTHERS) if args.long else args.trials
        for told in trials(bench, name, count):
            found[name].append(told)
            _tell(folder, name, len(found[name]), told)
    print(table(found))
    return int(any(isinstance(told, Failed) for all_told in found.values() for told in all_told))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', type=lambda text: text.split(','), help=f'some of {", ".join(FAULTS)}')
    parser.add_argument('--trials', type=int, default=1, help='of each fault')
    parser.add_argument('--long', action='store_true', help=f'{LONG_KILLS} kills, {LONG_OTHERS} of each other fault')
    parser.add_argument('--folder', default='runs/faults')
    parser.add_argument('--seed', type=int, help='of the moments; printed where it is not given')
    parser.add_argument('command', nargs='*', help='after --: what to run in place of a tiny pretraining')
    args = parser.parse_args()
    for name in args.only or ():
        if name not in FAULTS:
            parser.error(f'--only {name} is no fault; there are {", ".join(FAULTS)}')
    return args


def _tell(folder: pathlib.Path, name: str, number: int, told: Told | Failed) -> None:
    failed = isinstance(told, Failed)
    record = {'fault': name, 'trial': number, **({'failed': str(told)} if failed else dataclasses.asdict(told))}
    with (folder / 'results.jsonl').open('a') as file:
        file.write(json.dumps(record) + '\n')
    if failed:
        print(f'{name} {number}: FAILED: {told}', flush=True)
    else:
        seconds = '' if told.seconds is None else f', next step after {told.seconds:.1f} s'
        print(f'{name} {number}: {told.lost} steps lost{seconds}{". " if told.note else ""}{told.note}', flush=True)


def table(found: dict[str, list[Told | Failed]]) -> str:
    """Markdown: a row for each fault."""
    rows = ['| fault | trials | survived | steps lost, median (most) | seconds to the next step, median (most) |']
    rows.append('| --- | --- | --- | --- | --- |')
    for name, all_told in found.items():
        good = [told for told in all_told if isinstance(told, Told)]
        lost, seconds = [told.lost for told in good], [told.seconds for told in good if told.seconds is not None]
        rows.append(f'| {name} | {len(all_told)} | {len(good)} | {_middle(lost, ".0f")} | {_middle(seconds, ".1f")} |')
    return '\n'.join(rows)


def _middle(values: list, form: str) -> str:
    return f'{statistics.median(values):{form}} ({max(values):{form}})' if values else '-'


if __name__ == '__main__':
    sys.exit(main())
