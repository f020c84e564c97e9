"""The faults of faults.py, one function each: it breaks a run in the folder it is given, and returns what it found.

Several kills break the same run one after the other, so they are generators.
"""

import contextlib
import errno
import fcntl
import locale
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

from tests.faults.bench import HEARTBEAT, Bench, Failed, Told, wait, without_autograph, writing
from tests.support import compare_runs, ports

# A kill that was meant for a checkpoint's write and came after it.
OUTSIDE = 'outside of a write'
# Seconds that a start of the tiny pretraining takes, about.
STARTING = 8.0
# For faults that need no short heartbeat, which a busy machine misses.
PATIENT = '--heartbeat_timeout=100'


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
        wait(lambda: 'the first step compiles' in process.output(), process)
        # By now the log ends at the checkpoint's step.
        resumed = compare_runs.last_step(run)
        wait(lambda: compare_runs.last_step(run) > resumed, process)
        told.seconds = time.time() - begun
        if in_write:
            # First what the last kill left behind has to go; then a write or two may be whole.
            for _ in range(bench.chance.randint(1, 3)):
                wait(lambda: not writing(run), process)
                wait(lambda: writing(run), process)
            time.sleep(0.08 * bench.chance.random())
        else:
            wanted = resumed + bench.chance.randint(1, 40)
            wait(lambda: compare_runs.last_step(run) >= wanted, process)
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
    if in_write and not writing(run):
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
    return bench.finish(run, reached=reached, note=f'left in {time.monotonic() - begun:.1f} s')


def full_disk(bench: Bench, run: pathlib.Path) -> Told:
    """No file may grow beyond nine tenths of a checkpoint's largest: one line, and the last checkpoint stays."""
    process = bench.start(run)
    bench.some_checkpoint(run, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_small(bench), _small(bench)))
    code, reached = process.end(), compare_runs.last_step(run)
    error = process.error()
    if code != 2 or 'be written' not in error:
        raise Failed(f'exit code {code}, {error}')
    return bench.finish(run, reached=reached, note=error)


def full_disk_for_a_while(bench: Bench, run: pathlib.Path) -> Told:
    """As above for one checkpoint, with ON_SAVE_FAILURE = 'go_on': nothing is started again."""
    process = bench.start(run, '--gin.ON_SAVE_FAILURE=go_on')
    bench.some_checkpoint(run, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_small(bench), resource.RLIM_INFINITY))
    wait(lambda: 'training continues' in process.output(), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if process.end() != 0:
        raise Failed(f'it stopped: {process.log}')
    bench.compare(run)
    return Told()


def full_disk_of_model_dir(bench: Bench, run: pathlib.Path) -> Told:
    """MODEL_DIR's disk fills at a random moment, to the last byte: one line, also at a start while it is full."""
    with _small_disk(run, 4 * _bytes(bench.unbroken()) + 2**26):
        process = bench.start(run)
        bench.some_checkpoint(run, process)
        filler = run / 'filler'
        _fill(filler)
        if process.end() != 2:
            raise Failed(f'it did not stop: {process.log}')
        reached = compare_runs.last_step(run)
        # A start may make room by removing what was not finished, and then stops at its next checkpoint.
        note = f'{process.error()} | {bench.refused(run, "")}'
        filler.unlink()
        return bench.finish(run, reached=reached, note=note)


def kill_at_start(bench: Bench, run: pathlib.Path) -> Told:
    """SIGKILL at three random moments before the first step, with an empty cache: nothing unfinished stays there."""
    moments = []
    with _empty_cache(run) as cache:
        for _ in range(3):
            begun, process = time.monotonic(), bench.start(run)
            moment = begun + STARTING * bench.chance.random()
            while process.running and time.monotonic() < moment and compare_runs.last_step(run) == 0:
                time.sleep(0.01)
            process.send(signal.SIGKILL)
            process.end()
            moments.append(f'{time.monotonic() - begun:.1f} s')
        told = bench.finish(run, reached=compare_runs.last_step(run))
        left = [str(path) for path in cache.rglob('*.tmp*')]
        if left:
            raise Failed(f'the cache still has {", ".join(left)}')
    told.note = f'killed after {", ".join(moments)}'
    return told


def read_only(bench: Bench, run: pathlib.Path) -> Told:
    """MODEL_DIR turns read-only: one line."""
    process = bench.start(run)
    bench.some_checkpoint(run, process)
    with _read_only(run):
        code, reached = process.end(), compare_runs.last_step(run)
        bench.refused(run, 'cannot be written')
    if code != 2:
        raise Failed(f'exit code {code}: {process.log}')
    return bench.finish(run, reached=reached, note=process.error())


def _stopped(bench: Bench, run: pathlib.Path) -> None:
    """A run that is asked to stop at some step, with at least two checkpoints."""
    process = bench.start(run)
    bench.some_checkpoint(run, process)
    process.send(signal.SIGTERM)
    process.end()


def damaged(bench: Bench, run: pathlib.Path, how: str = '') -> Told:
    """A file of the newest checkpoint is cut, has a flipped bit or is gone: refused, or restored around."""
    _stopped(bench, run)
    steps = compare_runs.checkpoint_steps(run)
    files = [path for path in (run / 'checkpoints' / str(steps[-1])).rglob('*') if path.is_file()]
    path = bench.chance.choice([path for path in files if path.stat().st_size])
    how = how or bench.chance.choice(['cut', 'flipped', 'missing'])
    _damage(path, how, bench.chance)
    bench.refused(run, path.name)
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
    bench.refused(run, 'not finite', '--gin.LEARNING_RATE=1e38')
    if compare_runs.checkpoint_steps(run) != kept:
        raise Failed('another checkpoint was written')
    return bench.finish(run, reached=kept[-1])


def changed(bench: Bench, run: pathlib.Path) -> Told:
    """Batch size, model, vocabulary, seed or data changed: refused, and the same command as before continues."""
    _stopped(bench, run)
    kept = compare_runs.checkpoint_steps(run)
    flags = {'BATCH_SIZE': '--gin.BATCH_SIZE=16', 'SEED': '--gin.SEED=7', 'shape': '--gin.EMBED_DIM=32'}
    if bench.own:
        flags['vocabulary'] = '--gin.vocabularies.byte.extra_ids=50'
    for word, flag in flags.items():
        bench.refused(run, word, flag)
    if bench.own:
        text = bench.text.read_text()
        bench.text.write_text(text + '\n\nOne more paragraph.\n')
        try:
            bench.refused(run, 'the data has changed')
        finally:
            bench.text.write_text(text)
    return bench.finish(run, reached=kept[-1])


def host_killed(bench: Bench, run: pathlib.Path) -> Told:
    """One of two processes is killed: the other one is aborted by JAX."""
    bench.unbroken(2)
    both = bench.start_several(run)
    bench.some_step(run, both[0])
    victim = bench.chance.randrange(2)
    both[victim].send(signal.SIGKILL)
    begun = time.monotonic()
    both[victim].end()
    code, reached = both[1 - victim].end(), compare_runs.last_step(run)
    waited = time.monotonic() - begun
    if code != -signal.SIGABRT or waited > 3 * HEARTBEAT or 'another task died' not in both[1 - victim].output():
        raise Failed(f'the other one ended with {code} after {waited:.0f} s: {both[1 - victim].log}')
    return bench.finish(run, reached=reached, processes=2, note=f'the other one left after {waited:.1f} s')


def host_slow(bench: Bench, run: pathlib.Path) -> Told:
    """One of two processes stands still for half of the heartbeat time: the run continues."""
    bench.unbroken(2)
    both = bench.start_several(run)
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
    flags = (f'--coordinator_address=localhost:{ports.reserve()}', '--process_count=2', '--initialization_timeout=10')
    alone = bench.start(run, *flags, f'--process_index={bench.chance.randrange(2)}')
    begun = time.monotonic()
    code = alone.end(90)
    if code != -signal.SIGABRT:
        raise Failed(f'exit code {code}: {alone.log}')
    return bench.finish(run, reached=0, note=f'left after {time.monotonic() - begun:.1f} s')


def two_runs(bench: Bench, run: pathlib.Path) -> Told:
    """A second run in the same MODEL_DIR is refused, and the first one does not notice."""
    first = bench.start(run)
    bench.some_step(run, first, 5)
    first.send(signal.SIGSTOP)
    try:
        bench.refused(run, 'in use by process')
    finally:
        first.send(signal.SIGCONT)
    if first.end() != 0:
        raise Failed(f'the first run ended: {first.log}')
    bench.compare(run)
    return Told()


def odd_folder(bench: Bench, run: pathlib.Path) -> Told:
    """MODEL_DIR is relative and a link; its name has spaces, a line end, %, braces, $ and other alphabets."""
    real = run.with_name(f'{run.name} réel 模型 %d %s\n{{x}} $HOME')
    real.mkdir()
    run.symlink_to(real, target_is_directory=True)
    told = bench.finish(run, reached=bench.kill_at_some_step(os.path.relpath(real)))
    run.unlink()
    real.rename(run)
    return told


def clock_set_back(bench: Bench, run: pathlib.Path) -> Told:
    """Killed, and started again a month earlier, as Python's clock has it."""
    return bench.finish(run, reached=bench.kill_at_some_step(run), clock_shift=-30 * 86400.0)


def race(bench: Bench, run: pathlib.Path) -> Told:
    """Two runs start at the same moment in a new MODEL_DIR: one is refused, and the other does not notice."""
    both = [bench.start(run), bench.start(run)]
    codes = [process.end() for process in both]
    if sorted(codes) != [0, 2] or 'in use by process' not in both[codes.index(2)].error():
        raise Failed(f'they ended with {codes}: {both[0].log}, {both[1].log}')
    bench.compare(run)
    return Told()


def no_locks(bench: Bench, run: pathlib.Path) -> Told:
    """The file systems have no locks: one line for an empty cache; with a filled cache, a killed run resumes."""
    with _empty_cache(run):
        bench.refused(run, 'has no file locks', command=_without_locks)
    reached = bench.kill_at_some_step(run, command=_without_locks)
    return bench.finish(run, reached=reached, command=_without_locks)


def _without_locks(argv: list[str]) -> int:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = flock
    # Runs that have locks would take the files of this one for abandoned ones.
    tempfile.tempdir = tempfile.mkdtemp()
    return without_autograph(argv)


def poor_environment(bench: Bench, run: pathlib.Path) -> Told:
    """40 open files, the C locale, no HOME, and a read-only TMPDIR: the run works, and so does its next start."""
    process = bench.start(run, command=_in_a_poor_environment)
    reached = bench.some_step(run, process)
    process.send(signal.SIGTERM)
    if process.end() != 128 + signal.SIGTERM:
        raise Failed(f'it did not save: {process.log}')
    return bench.finish(run, reached=reached, command=_in_a_poor_environment)


def _in_a_poor_environment(argv: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    os.environ.setdefault('REMIXER_T5X_CACHE', os.path.expanduser('~/.cache/remixer_t5x'))
    os.environ |= {'HOME': '/dev/null/none', 'TMPDIR': '/proc', 'LC_ALL': 'C'}
    locale.setlocale(locale.LC_ALL, 'C')
    tempfile.tempdir = None
    return without_autograph(argv)


def low_memory(bench: Bench, run: pathlib.Path) -> Told:
    """Too little address space (ulimit -v): one line before anything is compiled."""
    bench.refused(run, 'ulimit -v', command=_with_low_memory)
    return bench.finish(run, reached=0)


def _with_low_memory(argv: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    return without_autograph(argv)


def data_removed(bench: Bench, run: pathlib.Path) -> Told:
    """The text and its parsed copy in the cache vanish while a run reads them: it stops in one line or continues."""
    if not bench.own:
        raise Failed('this removes the data of a run; not for your own')
    moved = bench.text.with_name('moved')
    with _empty_cache(run) as cache:
        process = bench.start(run)
        bench.some_checkpoint(run, process)
        bench.text.rename(moved)
        shutil.rmtree(cache)
        code, reached = process.end(), compare_runs.last_step(run)
        try:
            note = bench.refused(run, 'correct the path')
        finally:
            moved.rename(bench.text)
        if code not in (0, 2):
            raise Failed(f'exit code {code}: {process.log}')
        return bench.finish(run, reached=reached, note=f'{process.error() if code else "it ended"} | {note}')


def host_disk_full(bench: Bench, run: pathlib.Path) -> Told:
    """The disk of one of two processes is full when it writes its part of a checkpoint: both end in one line."""
    bench.unbroken(2)
    both = bench.start_several(run, PATIENT)
    bench.some_checkpoint(run, both[0])
    resource.prlimit(bench.chance.choice(both).pid, resource.RLIMIT_FSIZE, (_small(bench) // 4,) * 2)
    codes, reached = [process.end() for process in both], compare_runs.last_step(run)
    if codes != [2, 2]:
        raise Failed(f'they ended with {codes}: {both[0].log}, {both[1].log}')
    note = ' | '.join(process.error() for process in both)
    return bench.finish(run, reached=reached, processes=2, note=note)


def other_processes(bench: Bench, run: pathlib.Path) -> Told:
    """Two processes are killed, three continue and are killed, one finishes: the same losses, to rounding."""
    for count in (2, 3):
        started = bench.start_several(run, PATIENT, count=count)
        bench.some_checkpoint(run, started[0])
        for process in started:
            process.send(signal.SIGKILL)
            process.end()
    alone = bench.start(run)
    if alone.end() != 0:
        raise Failed(f'one process does not continue: {alone.log}')
    for ours, theirs in zip(compare_runs.logged(run), compare_runs.logged(bench.unbroken(2)), strict=True):
        if ours['step'] != theirs['step'] or abs(ours['loss'] - theirs['loss']) > 1e-3 * theirs['loss']:
            raise Failed(f'{ours} instead of {theirs}')
    return Told()


@contextlib.contextmanager
def _empty_cache(run: pathlib.Path) -> Iterator[pathlib.Path]:
    """Runs that start within the block have an empty cache."""
    before, cache = os.environ.get('REMIXER_T5X_CACHE'), run.parent / f'cache_of_{run.name}'
    os.environ['REMIXER_T5X_CACHE'] = str(cache)
    try:
        yield cache
    finally:
        os.environ.pop('REMIXER_T5X_CACHE')
        if before is not None:
            os.environ['REMIXER_T5X_CACHE'] = before


def _small(bench: Bench) -> int:
    files = pathlib.Path(bench.unbroken(), 'checkpoints').rglob('*')
    # The position in the data, which a run writes to TMPDIR first, is smaller.
    return max(path.stat().st_size for path in files if path.is_file()) * 9 // 10


def _bytes(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())


def _fill(path: pathlib.Path) -> None:
    """Writes the file until the disk has no room left."""
    with path.open('wb', buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


@contextlib.contextmanager
def _small_disk(folder: pathlib.Path, size: int) -> Iterator[None]:
    """`folder` is a disk of its own, of `size` bytes in memory. Needs root."""
    if os.geteuid() != 0:
        raise Failed('a disk that can be filled needs root')
    folder.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(['umount', '--lazy', str(folder)], check=True)


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


FAULTS = {
    fault.__name__: fault
    for fault in (
        *(kill, kill_in_write, kill_at_start, sigterm, sigint, signal_twice, full_disk, full_disk_for_a_while),
        *(full_disk_of_model_dir, read_only, damaged, not_finite, changed, host_killed, host_slow, host_never_comes),
        *(
            host_disk_full,
            other_processes,
            two_runs,
            race,
            no_locks,
            poor_environment,
            low_memory,
            data_removed,
            odd_folder,
        ),
        *(clock_set_back,),
    )
}
KILLS = ('kill', 'kill_in_write')
