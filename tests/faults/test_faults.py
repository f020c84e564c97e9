"""Injects faults into real training runs, starts the command again, and compares the result with an uninterrupted run.

Parameters, optimizer state, the loss of every step and the position in the data must be bit-equal. Some of the tests
run only with `pytest tests/faults --long`. They need Linux, and root to mount file systems.
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

import jax.numpy as jnp
import pytest

from remixer_t5x.checkpoints import checkpoint_manager
from remixer_t5x.data.prefetch import DataPosition
from remixer_t5x.run_folder import model_dir
from tests.faults.bench import HEARTBEAT, Bench, is_writing_checkpoint
from tests.support import command_without_autograph, compare_runs

ONLY_LONG = pytest.mark.skipif('not config.getoption("--long")', reason='runs only with --long')
# Approximate seconds from the start of the tiny run to its first step.
STARTING = 8.0


@pytest.fixture(scope='module')
def bench(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp('faults')
        patch.setenv('REMIXER_T5X_CACHE', str(folder / 'cache'))
        yield Bench(folder)


@pytest.fixture
def run(tmp_path):
    return tmp_path / 'run'


@pytest.fixture
def empty_cache(run, monkeypatch):
    cache = run.parent / 'cache'
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(cache))
    return cache


@ONLY_LONG
@pytest.mark.parametrize('in_write', [True, False])
def test_kills(bench, run, in_write):
    """SIGKILL while a checkpoint is written or at random moments, and again until the run ends."""
    while kill_once(bench, run, in_write):
        pass
    bench.compare(run)


def kill_once(bench: Bench, run: pathlib.Path, in_write: bool) -> bool:
    """Starts and kills the run once. Returns False if the run ended first."""
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
            bench.wait_for_step(run, process, 40)
    except AssertionError:
        process.expect_exit(0)
    return process.kill() != 0


@ONLY_LONG
def test_kills_at_the_start(bench, run, empty_cache):
    """SIGKILL at three random moments before the first step, with an empty cache: no temporary files remain."""
    for _ in range(3):
        begun, process = time.monotonic(), bench.start(run)
        moment = begun + STARTING * bench.rng.random()
        while process.running and time.monotonic() < moment and compare_runs.last_step(run) == 0:
            time.sleep(0.01)
        process.kill()
    bench.finish(run)
    assert not list(empty_cache.rglob('*.tmp*'))


def test_a_poor_environment_and_changed_data(bench, run):
    """40 open files, the C locale, no HOME, and a read-only TMPDIR: the run works, and resumes with the same data."""
    process = bench.start(run, command=run_in_a_poor_environment)
    bench.wait_for_checkpoints(run, process)
    process.send(signal.SIGTERM)
    process.expect_exit(128 + signal.SIGTERM)
    text = bench.text.read_text()
    bench.text.write_text(text + '\n\nOne more paragraph.\n')
    try:
        bench.expect_error(run, 'the data has changed')
    finally:
        bench.text.write_text(text)
    bench.finish(run, command=run_in_a_poor_environment)


def run_in_a_poor_environment(argv: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    os.environ |= {'HOME': '/dev/null/none', 'TMPDIR': '/proc', 'LC_ALL': 'C'}
    locale.setlocale(locale.LC_ALL, 'C')
    tempfile.tempdir = None
    return command_without_autograph.main(argv)


@ONLY_LONG
def test_a_full_disk_of_model_dir(bench, run):
    """The disk of MODEL_DIR fills up at a random moment: a one-line error, also at the next start."""
    size = sum(path.stat().st_size for path in bench.uninterrupted().rglob('*') if path.is_file())
    run.mkdir()
    subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={4 * size + 2**26}', 'tmpfs', str(run)], check=True)
    try:
        process = bench.start(run)
        bench.wait_for_checkpoints(run, process)
        with (run / 'filler').open('wb', buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(2**12)):
                pass
        process.expect_exit(2)
        assert process.error()
        # A start may free space by removing unfinished writes, and then fails at its next checkpoint.
        bench.expect_error(run, '')
        (run / 'filler').unlink()
        bench.finish(run)
    finally:
        subprocess.run(['umount', '--lazy', str(run)], check=True)


@ONLY_LONG
def test_a_read_only_model_dir(bench, run):
    process = bench.start(run)
    bench.wait_for_checkpoints(run, process)
    subprocess.run(['mount', '--bind', str(run), str(run)], check=True)
    try:
        subprocess.run(['mount', '-o', 'remount,ro,bind', str(run)], check=True)
        process.expect_exit(2)
        bench.expect_error(run, 'cannot be written')
    finally:
        subprocess.run(['umount', '--lazy', str(run)], check=True)
    bench.finish(run)


@ONLY_LONG
def test_a_suspended_process(bench, run):
    """One of two processes is suspended for half of the heartbeat timeout: the run continues."""
    both = bench.start_several(run)
    bench.wait_for_step(run, both[0])
    slow = bench.rng.choice(both)
    slow.send(signal.SIGSTOP)
    time.sleep(HEARTBEAT / 2)
    slow.send(signal.SIGCONT)
    for process in both:
        process.expect_exit(0)
    bench.compare(run, 2)


@ONLY_LONG
def test_a_full_disk_of_one_of_two_processes(bench, run):
    """The disk of a process is full when it writes its shards of a checkpoint: both end with an error."""
    # A long heartbeat timeout, because a busy machine may miss a short one.
    both = bench.start_several(run, heartbeat=100)
    bench.wait_for_checkpoints(run, both[0])
    files = pathlib.Path(bench.uninterrupted(), 'checkpoints').rglob('*')
    # The file of the data position, which is first written to TMPDIR, is smaller than this limit.
    limit = max(path.stat().st_size for path in files if path.is_file()) // 5
    resource.prlimit(bench.rng.choice(both).pid, resource.RLIMIT_FSIZE, (limit, limit))
    for process in both:
        process.expect_exit(2)
        assert process.error()
    bench.finish(run, 2)


@ONLY_LONG
def test_two_runs_start_at_the_same_moment(bench, run):
    """In a new MODEL_DIR, one is rejected, and does not affect the other."""
    both = [bench.start(run), bench.start(run)]
    codes = [process.wait() for process in both]
    assert sorted(codes) == [0, 2]
    assert 'in use by process' in both[codes.index(2)].error()
    bench.compare(run)


@ONLY_LONG
def test_a_file_system_without_locks(bench, run, monkeypatch):
    """An error with an empty cache; with a filled cache, a killed run resumes."""
    bench.uninterrupted()
    with monkeypatch.context() as patch:
        patch.setenv('REMIXER_T5X_CACHE', str(run.parent / 'cache without locks'))
        bench.expect_error(run, 'No locks available', command=run_without_locks)
    bench.kill_at_random_step(run, command=run_without_locks)
    bench.finish(run, command=run_without_locks)


def run_without_locks(argv: list[str]) -> int:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    fcntl.flock = flock
    # Runs with locks would treat the temporary files of this run as abandoned.
    tempfile.tempdir = tempfile.mkdtemp()
    return command_without_autograph.main(argv)


@ONLY_LONG
def test_removed_data(bench, run, empty_cache):
    """The text and its parsed copy are removed during a run: a one-line error, or the run continues."""
    moved = bench.text.with_name('moved')
    process = bench.start(run)
    bench.wait_for_checkpoints(run, process)
    bench.text.rename(moved)
    try:
        shutil.rmtree(empty_cache)
        assert process.wait() == 0 or process.error()
        bench.expect_error(run, 'correct the path')
    finally:
        moved.rename(bench.text)
    bench.finish(run)


def test_the_comparison_detects_changed_arrays_logs_and_positions(tmp_path):
    def save_run(name, value=1.0, loss=2.0, batches=4):
        folder = model_dir.create_model_dir(tmp_path / name)
        (folder / 'metrics.jsonl').write_text(f'{{"kind": "train", "step": 1, "loss": {loss}, "timing": {{}}}}\n')
        checkpoints = checkpoint_manager.RunCheckpoints(folder)
        checkpoints.save(1, {'w': jnp.full(3, value)}, DataPosition(batches), {'window': {}})
        checkpoints.close()
        return folder

    reference = save_run('reference')
    assert compare_runs.difference(reference, save_run('same'), 1) is None
    assert compare_runs.difference(reference, save_run('bit', value=1.0000001), 1) == 'the array w'
    assert compare_runs.difference(reference, save_run('log', loss=2.5), 1) == 'the log at step 1'
    assert compare_runs.difference(reference, save_run('position', batches=5), 1) == 'the number of batches drawn'
