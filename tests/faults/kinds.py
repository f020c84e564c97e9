"""The faults. Each function injects a fault into a run in the given folder, and returns the result.

Kills are generators, because a run is killed several times.
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

from tests.faults.bench import (
    HEARTBEAT,
    Bench,
    TrialFailed,
    TrialResult,
    is_writing_checkpoint,
    wait,
    without_autograph,
)
from tests.support import compare_runs

# Note on a kill that did not interrupt the write of a checkpoint.
OUTSIDE = 'outside of a write'
# Approximate seconds from the start of the tiny run to its first step.
STARTING = 8.0
# A long heartbeat timeout, because a busy machine may miss a short one.
PATIENT = '--heartbeat_timeout=100'


def kill(bench: Bench, run: pathlib.Path, in_write: bool = False) -> Iterator[TrialResult]:
    """SIGKILL at random moments, or with `in_write` while a checkpoint is written, until the run ends."""
    while (result := _kill_once(bench, run, in_write)) is not None:
        if result.note != OUTSIDE:
            yield result
    bench.compare(run)


def _kill_once(bench: Bench, run: pathlib.Path, in_write: bool) -> TrialResult | None:
    """Starts and kills the run once. Returns None if the run ended first."""
    process, begun = bench.start(run), time.time()
    result = TrialResult()
    try:
        wait(lambda: 'the first step compiles' in process.output(), process)
        # At this point, the run has removed the records after its checkpoint.
        resumed = compare_runs.last_step(run)
        wait(lambda: compare_runs.last_step(run) > resumed, process)
        result.seconds = time.time() - begun
        if in_write:
            # Waits until the unfinished checkpoint of the last kill is removed, and then for one to three writes.
            for _ in range(bench.rng.randint(1, 3)):
                wait(lambda: not is_writing_checkpoint(run), process)
                wait(lambda: is_writing_checkpoint(run), process)
            time.sleep(0.08 * bench.rng.random())
        else:
            target = resumed + bench.rng.randint(1, 40)
            wait(lambda: compare_runs.last_step(run) >= target, process)
            time.sleep(0.05 * bench.rng.random())
    except TrialFailed:
        if process.running or process.end() != 0:
            raise
    process.send(signal.SIGKILL)
    code, reached = process.end(), compare_runs.last_step(run)
    if code == 0:
        return None
    saved = compare_runs.checkpoint_steps(run)
    result.lost = max(0, reached - (saved[-1] if saved else 0))
    if in_write and not is_writing_checkpoint(run):
        result.note = OUTSIDE
    return result


def kill_in_write(bench: Bench, run: pathlib.Path) -> Iterator[TrialResult]:
    """SIGKILL while a checkpoint is written, which leaves an unfinished folder."""
    return kill(bench, run, in_write=True)


def sigterm(bench: Bench, run: pathlib.Path, number: int = signal.SIGTERM) -> TrialResult:
    """SIGTERM: the run saves the current step."""
    process = bench.start(run)
    bench.wait_for_step(run, process)
    process.send(number)
    process.expect_exit(128 + number)
    reached, saved = compare_runs.last_step(run), compare_runs.checkpoint_steps(run)[-1]
    if saved < reached:
        raise TrialFailed(f'saved step {saved} after step {reached}')
    return bench.finish(run, reached=reached)


def sigint(bench: Bench, run: pathlib.Path) -> TrialResult:
    """SIGINT (Ctrl-C): the run saves the current step."""
    return sigterm(bench, run, signal.SIGINT)


def signal_twice(bench: Bench, run: pathlib.Path) -> TrialResult:
    """SIGTERM and SIGINT together: the run exits at once."""
    process = bench.start(run)
    reached = bench.wait_for_checkpoints(run, process)
    # Stops the process first, so that it receives both at once.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send(number)
    begun = time.monotonic()
    process.expect_exit(128 + signal.SIGTERM, 128 + signal.SIGINT)
    return bench.finish(run, reached=reached, note=f'exited in {time.monotonic() - begun:.1f} s')


def full_disk(bench: Bench, run: pathlib.Path) -> TrialResult:
    """A file size limit below the largest file of a checkpoint: a one-line error, and the last checkpoint is kept."""
    process = bench.start(run)
    bench.wait_for_checkpoints(run, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_file_limit(bench), _file_limit(bench)))
    process.expect_exit(2)
    if 'be written' not in process.error():
        raise TrialFailed(process.error())
    return bench.finish(run, reached=compare_runs.last_step(run), note=process.error())


def full_disk_for_a_while(bench: Bench, run: pathlib.Path) -> TrialResult:
    """The same limit for one checkpoint only, with ON_SAVE_FAILURE = 'continue': the run continues."""
    process = bench.start(run, '--gin.ON_SAVE_FAILURE=continue')
    bench.wait_for_checkpoints(run, process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_file_limit(bench), resource.RLIM_INFINITY))
    wait(lambda: 'training continues' in process.output(), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    process.expect_exit(0)
    bench.compare(run)
    return TrialResult()


def full_disk_of_model_dir(bench: Bench, run: pathlib.Path) -> TrialResult:
    """The disk of MODEL_DIR fills up at a random moment: a one-line error, also at the next start."""
    with _small_disk(run, 4 * _folder_size(bench.uninterrupted()) + 2**26):
        process = bench.start(run)
        bench.wait_for_checkpoints(run, process)
        filler = run / 'filler'
        _fill(filler)
        process.expect_exit(2)
        reached = compare_runs.last_step(run)
        # A start may free space by removing unfinished writes, and then fails at its next checkpoint.
        note = f'{process.error()} | {bench.expect_error(run, "")}'
        filler.unlink()
        return bench.finish(run, reached=reached, note=note)


def kill_at_start(bench: Bench, run: pathlib.Path) -> TrialResult:
    """SIGKILL at three random moments before the first step, with an empty cache: no temporary files remain."""
    moments = []
    with _empty_cache(run) as cache:
        for _ in range(3):
            begun, process = time.monotonic(), bench.start(run)
            moment = begun + STARTING * bench.rng.random()
            while process.running and time.monotonic() < moment and compare_runs.last_step(run) == 0:
                time.sleep(0.01)
            process.send(signal.SIGKILL)
            process.end()
            moments.append(f'{time.monotonic() - begun:.1f} s')
        result = bench.finish(run, reached=compare_runs.last_step(run))
        temporary = [str(path) for path in cache.rglob('*.tmp*')]
        if temporary:
            raise TrialFailed(f'the cache still contains {", ".join(temporary)}')
    result.note = f'killed after {", ".join(moments)}'
    return result


def read_only(bench: Bench, run: pathlib.Path) -> TrialResult:
    """MODEL_DIR becomes read-only: a one-line error."""
    process = bench.start(run)
    bench.wait_for_checkpoints(run, process)
    with _read_only(run):
        process.expect_exit(2)
        bench.expect_error(run, 'cannot be written')
    return bench.finish(run, reached=compare_runs.last_step(run), note=process.error())


def _stop_after_checkpoints(bench: Bench, run: pathlib.Path) -> None:
    """Runs until there are at least two checkpoints, and stops the run."""
    process = bench.start(run)
    bench.wait_for_checkpoints(run, process)
    process.send(signal.SIGTERM)
    process.end()


def damaged(bench: Bench, run: pathlib.Path, how: str = '') -> TrialResult:
    """A file of the newest checkpoint is truncated, changed or missing: an error; --restore=previous resumes."""
    _stop_after_checkpoints(bench, run)
    steps = compare_runs.checkpoint_steps(run)
    files = [path for path in (run / 'checkpoints' / str(steps[-1])).rglob('*') if path.is_file()]
    path = bench.rng.choice([path for path in files if path.stat().st_size])
    how = how or bench.rng.choice(['cut', 'flipped', 'missing'])
    _damage(path, how, bench.rng)
    bench.expect_error(run, path.name)
    result = bench.finish(run, '--restore=previous', reached=steps[-1])
    result.lost = steps[-1] - steps[-2]
    return result


def _damage(path: pathlib.Path, how: str, rng: random.Random) -> None:
    content = path.read_bytes()
    at = rng.randrange(len(content))
    if how == 'missing':
        path.unlink()
    elif how == 'cut':
        path.write_bytes(content[:at])
    else:
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :])


def changed(bench: Bench, run: pathlib.Path) -> TrialResult:
    """Batch size, model, vocabulary, seed or data changed: an error; the original command resumes."""
    _stop_after_checkpoints(bench, run)
    kept = compare_runs.checkpoint_steps(run)
    flags = {'BATCH_SIZE': '--gin.BATCH_SIZE=16', 'SEED': '--gin.SEED=7', 'shape': '--gin.EMBED_DIM=32'}
    if bench.is_default:
        flags['vocabulary'] = '--gin.vocabularies.byte.extra_ids=50'
    for word, flag in flags.items():
        bench.expect_error(run, word, flag)
    if bench.is_default:
        text = bench.text.read_text()
        bench.text.write_text(text + '\n\nOne more paragraph.\n')
        try:
            bench.expect_error(run, 'the data has changed')
        finally:
            bench.text.write_text(text)
    return bench.finish(run, reached=kept[-1])


def host_slow(bench: Bench, run: pathlib.Path) -> TrialResult:
    """One of two processes is suspended for half of the heartbeat timeout: the run continues."""
    bench.uninterrupted(2)
    both = bench.start_several(run)
    bench.wait_for_step(run, both[0])
    slow = bench.rng.choice(both)
    slow.send(signal.SIGSTOP)
    time.sleep(HEARTBEAT / 2)
    slow.send(signal.SIGCONT)
    for process in both:
        process.expect_exit(0)
    bench.compare(run, 2)
    return TrialResult()


def odd_folder(bench: Bench, run: pathlib.Path) -> TrialResult:
    """MODEL_DIR is relative and a link; its name contains spaces, a newline, %, braces, $ and non-ASCII letters."""
    real = run.with_name(f'{run.name} réel 模型 %d %s\n{{x}} $HOME')
    real.mkdir()
    run.symlink_to(real, target_is_directory=True)
    result = bench.finish(run, reached=bench.kill_at_random_step(os.path.relpath(real)))
    run.unlink()
    real.rename(run)
    return result


def clock_set_back(bench: Bench, run: pathlib.Path) -> TrialResult:
    """A kill, and a restart with Python's clock set back by a month."""
    return bench.finish(run, reached=bench.kill_at_random_step(run), clock_shift=-30 * 86400.0)


def race(bench: Bench, run: pathlib.Path) -> TrialResult:
    """Two runs start at the same moment in a new MODEL_DIR: one is rejected, and does not affect the other."""
    both = [bench.start(run), bench.start(run)]
    codes = [process.end() for process in both]
    if sorted(codes) != [0, 2] or 'in use by process' not in both[codes.index(2)].error():
        raise TrialFailed(f'they ended with {codes}: {both[0].log}, {both[1].log}')
    bench.compare(run)
    return TrialResult()


def no_locks(bench: Bench, run: pathlib.Path) -> TrialResult:
    """A file system without locks: an error with an empty cache; with a filled cache, a killed run resumes."""
    with _empty_cache(run):
        bench.expect_error(run, 'must support file locks', command=_without_locks)
    reached = bench.kill_at_random_step(run, command=_without_locks)
    return bench.finish(run, reached=reached, command=_without_locks)


def _without_locks(argv: list[str]) -> int:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = flock
    # Runs with locks would treat the temporary files of this run as abandoned.
    tempfile.tempdir = tempfile.mkdtemp()
    return without_autograph(argv)


def poor_environment(bench: Bench, run: pathlib.Path) -> TrialResult:
    """40 open files, the C locale, no HOME, and a read-only TMPDIR: the run works and resumes."""
    process = bench.start(run, command=_in_a_poor_environment)
    reached = bench.wait_for_step(run, process)
    process.send(signal.SIGTERM)
    process.expect_exit(128 + signal.SIGTERM)
    return bench.finish(run, reached=reached, command=_in_a_poor_environment)


def _in_a_poor_environment(argv: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    os.environ.setdefault('REMIXER_T5X_CACHE', os.path.expanduser('~/.cache/remixer_t5x'))
    os.environ |= {'HOME': '/dev/null/none', 'TMPDIR': '/proc', 'LC_ALL': 'C'}
    locale.setlocale(locale.LC_ALL, 'C')
    tempfile.tempdir = None
    return without_autograph(argv)


def low_memory(bench: Bench, run: pathlib.Path) -> TrialResult:
    """Too little address space (ulimit -v): a one-line error before compilation."""
    bench.expect_error(run, 'ulimit -v', command=_with_low_memory)
    return bench.finish(run, reached=0)


def _with_low_memory(argv: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    return without_autograph(argv)


def data_removed(bench: Bench, run: pathlib.Path) -> TrialResult:
    """The text and its parsed copy are removed during a run: a one-line error, or the run continues."""
    if not bench.is_default:
        raise TrialFailed('this fault removes data, and is only injected into the default run')
    moved = bench.text.with_name('moved')
    with _empty_cache(run) as cache:
        process = bench.start(run)
        bench.wait_for_checkpoints(run, process)
        bench.text.rename(moved)
        shutil.rmtree(cache)
        code, reached = process.expect_exit(0, 2), compare_runs.last_step(run)
        try:
            note = bench.expect_error(run, 'correct the path')
        finally:
            moved.rename(bench.text)
        return bench.finish(run, reached=reached, note=f'{process.error() if code else "it ended"} | {note}')


def host_disk_full(bench: Bench, run: pathlib.Path) -> TrialResult:
    """The disk of one of two processes is full when it writes its shards of a checkpoint: both end with an error."""
    bench.uninterrupted(2)
    both = bench.start_several(run, PATIENT)
    bench.wait_for_checkpoints(run, both[0])
    resource.prlimit(bench.rng.choice(both).pid, resource.RLIMIT_FSIZE, (_file_limit(bench) // 4,) * 2)
    for process in both:
        process.expect_exit(2)
    note = ' | '.join(process.error() for process in both)
    return bench.finish(run, reached=compare_runs.last_step(run), processes=2, note=note)


def other_processes(bench: Bench, run: pathlib.Path) -> TrialResult:
    """Two processes are killed, three resume and are killed, one finishes: equal losses up to rounding."""
    for count in (2, 3):
        started = bench.start_several(run, PATIENT, count=count)
        bench.wait_for_checkpoints(run, started[0])
        for process in started:
            process.send(signal.SIGKILL)
            process.end()
    bench.start(run).expect_exit(0)
    for ours, theirs in zip(compare_runs.read_log(run), compare_runs.read_log(bench.uninterrupted(2)), strict=True):
        if ours['step'] != theirs['step'] or abs(ours['loss'] - theirs['loss']) > 1e-3 * theirs['loss']:
            raise TrialFailed(f'{ours} instead of {theirs}')
    return TrialResult()


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


def _file_limit(bench: Bench) -> int:
    files = pathlib.Path(bench.uninterrupted(), 'checkpoints').rglob('*')
    # The file of the data position, which is first written to TMPDIR, is smaller than this limit.
    return max(path.stat().st_size for path in files if path.is_file()) * 9 // 10


def _folder_size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())


def _fill(path: pathlib.Path) -> None:
    """Writes to the file until the disk is full."""
    with path.open('wb', buffering=0) as file:
        for size in (2**20, 2**12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


@contextlib.contextmanager
def _small_disk(folder: pathlib.Path, size: int) -> Iterator[None]:
    """Mounts a file system of `size` bytes in memory at `folder`. Needs root."""
    if os.geteuid() != 0:
        raise TrialFailed('mounting a small disk needs root')
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
        *(full_disk_of_model_dir, read_only, damaged, changed, host_slow, host_disk_full, other_processes, race),
        *(no_locks, poor_environment, low_memory, data_removed, odd_folder, clock_set_back),
    )
}
KILLS = ('kill', 'kill_in_write')
