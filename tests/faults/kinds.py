"""The faults. Each function injects a fault into a run in the given folder, and returns the result.

Kills are generators, because a run is killed several times.
"""

import contextlib
import errno
import fcntl
import locale
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

from tests.faults.bench import HEARTBEAT, Bench, TrialResult, is_writing_checkpoint
from tests.support import command_without_autograph, compare_runs

# Approximate seconds from the start of the tiny run to its first step.
STARTING = 8.0
# A long heartbeat timeout, because a busy machine may miss a short one.
PATIENT = '--heartbeat_timeout=100'


def kill(bench: Bench, run: pathlib.Path, in_write: bool = False) -> Iterator[TrialResult]:
    """SIGKILL at random moments, or with `in_write` while a checkpoint is written, until the run ends."""
    while (result := _kill_once(bench, run, in_write)) is not None:
        # Skips kills that did not interrupt the write of a checkpoint.
        if not in_write or is_writing_checkpoint(run):
            yield result
    bench.compare(run)


def _kill_once(bench: Bench, run: pathlib.Path, in_write: bool) -> TrialResult | None:
    """Starts and kills the run once. Returns None if the run ended first."""
    process = bench.start(run)
    try:
        process.wait_until(lambda: 'the first step compiles' in process.output())
        # At this point, the run has removed the records after its checkpoint.
        resumed = compare_runs.last_step(run)
        process.wait_until(lambda: compare_runs.last_step(run) > resumed)
        if in_write:
            # Waits until the unfinished checkpoint of the last kill is removed, and then for one to three writes.
            for _ in range(bench.rng.randint(1, 3)):
                process.wait_until(lambda: not is_writing_checkpoint(run))
                process.wait_until(lambda: is_writing_checkpoint(run))
            time.sleep(0.08 * bench.rng.random())
        else:
            target = resumed + bench.rng.randint(1, 40)
            process.wait_until(lambda: compare_runs.last_step(run) >= target)
            time.sleep(0.05 * bench.rng.random())
    except AssertionError:
        if process.wait() != 0:
            raise
    if process.kill() == 0:
        return None
    saved = compare_runs.checkpoint_steps(run)
    return TrialResult(max(0, compare_runs.last_step(run) - (saved[-1] if saved else 0)))


def kill_in_write(bench: Bench, run: pathlib.Path) -> Iterator[TrialResult]:
    """SIGKILL while a checkpoint is written, which leaves an unfinished folder."""
    return kill(bench, run, in_write=True)


def sigterm(bench: Bench, run: pathlib.Path) -> TrialResult:
    """SIGTERM or SIGINT (Ctrl-C): the run saves the current step."""
    process, number = bench.start(run), bench.rng.choice([signal.SIGTERM, signal.SIGINT])
    bench.wait_for_step(run, process)
    process.send(number)
    process.expect_exit(128 + number)
    reached, saved = compare_runs.last_step(run), compare_runs.checkpoint_steps(run)[-1]
    assert saved >= reached, f'saved step {saved} after step {reached}'
    return bench.finish(run, reached=reached)


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
            process.kill()
            moments.append(f'{time.monotonic() - begun:.1f} s')
        result = bench.finish(run, reached=compare_runs.last_step(run))
        temporary = [str(path) for path in cache.rglob('*.tmp*')]
        assert not temporary, f'the cache still contains {temporary}'
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


def changed(bench: Bench, run: pathlib.Path) -> TrialResult:
    """The data changed: an error; the original data resumes."""
    assert bench.is_default, 'this fault changes data, and is only injected into the default run'
    reached = bench.stop_after_checkpoints(run)
    text = bench.text.read_text()
    bench.text.write_text(text + '\n\nOne more paragraph.\n')
    try:
        bench.expect_error(run, 'the data has changed')
    finally:
        bench.text.write_text(text)
    return bench.finish(run, reached=reached)


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


def clock_set_back(bench: Bench, run: pathlib.Path) -> TrialResult:
    """A kill, and a restart with Python's clock set back by a month."""
    return bench.finish(run, reached=bench.kill_at_random_step(run), clock_shift=-30 * 86400.0)


def race(bench: Bench, run: pathlib.Path) -> TrialResult:
    """Two runs start at the same moment in a new MODEL_DIR: one is rejected, and does not affect the other."""
    both = [bench.start(run), bench.start(run)]
    codes = [process.wait() for process in both]
    assert sorted(codes) == [0, 2], f'they ended with {codes}: {both[0].log}, {both[1].log}'
    assert 'in use by process' in both[codes.index(2)].error()
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
    return command_without_autograph.main(argv)


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
    return command_without_autograph.main(argv)


def data_removed(bench: Bench, run: pathlib.Path) -> TrialResult:
    """The text and its parsed copy are removed during a run: a one-line error, or the run continues."""
    assert bench.is_default, 'this fault removes data, and is only injected into the default run'
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
    files = pathlib.Path(bench.uninterrupted(), 'checkpoints').rglob('*')
    # The file of the data position, which is first written to TMPDIR, is smaller than this limit.
    limit = max(path.stat().st_size for path in files if path.is_file()) // 5
    resource.prlimit(bench.rng.choice(both).pid, resource.RLIMIT_FSIZE, (limit, limit))
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
            process.kill()
    bench.start(run).expect_exit(0)
    for ours, theirs in zip(compare_runs.read_log(run), compare_runs.read_log(bench.uninterrupted(2)), strict=True):
        is_close = abs(ours['loss'] - theirs['loss']) <= 1e-3 * theirs['loss']
        assert ours['step'] == theirs['step'] and is_close, f'{ours} instead of {theirs}'
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
    assert os.geteuid() == 0, 'mounting a small disk needs root'
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
        *(kill, kill_in_write, kill_at_start, sigterm, full_disk_of_model_dir, read_only, changed, host_slow),
        *(host_disk_full, other_processes, race, no_locks, poor_environment, data_removed, clock_set_back),
    )
}
KILLS = ('kill', 'kill_in_write')
