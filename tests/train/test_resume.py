"""A run that is killed at any time and restarted ends bit-identical to an uninterrupted run.

Real processes are killed at random moments; the tests print the seed and the moments.
"""

import itertools
import json
import random
import shutil
import signal
import time

import numpy as np
import pytest

from remixer_t5x.train import preemption
from tests.golden import make_resumable_run
from tests.support import tiny_training
from tests.support.compare_runs import checkpoint_steps, difference, last_step, read_log
from tests.support.paths import GOLDEN

RUN = {
    'train_steps': 80,
    'log_period': 7,
    'eval_period': 25,
    'checkpoint_period': 10,
    'dropout_rate': 0.1,
    'eval_at_start': True,
    'length_buckets': (10, 13),
}


def start_and_signal(training, number, moment, folder):
    """Starts the run, sends the signal `number` when `moment()` is true, and returns exit code and output."""
    process = training.start(model_dir=str(folder), **RUN)
    process.wait_until(lambda: moment() or not process.running, 'the moment of the signal')
    process.send(number)
    return process.wait(), process.output()


@pytest.fixture(scope='module')
def uninterrupted(training, tmp_path_factory):
    folder = tmp_path_factory.mktemp('uninterrupted') / 'run'
    code, output = training.run(model_dir=str(folder), **RUN)
    assert code == 0, output
    return folder


def test_a_run_that_is_killed_and_stopped_ends_bit_identical(training, uninterrupted, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    rng, folder, log = random.Random(seed), tmp_path / 'run', []

    def writing():
        path = folder / 'checkpoints'
        return path.exists() and any('tmp' in p.name for p in path.iterdir())

    def after_step(step, delay):
        def moment():
            if last_step(folder) < step:
                return False
            time.sleep(delay)
            return True

        return moment

    moments = [
        ('after the evaluation at the start', signal.SIGKILL, lambda: bool(read_log(folder))),
        ('after step 14 was logged', signal.SIGTERM, lambda: last_step(folder) >= 14),
        ('while a checkpoint is written', signal.SIGKILL, writing),
    ]
    step, delay = rng.randrange(28, 60), rng.random() * 0.02
    moments.append((f'{1000 * delay:.1f} ms after step {step} was logged', signal.SIGKILL, after_step(step, delay)))
    for name, number, moment in moments:
        code, output = start_and_signal(training, number, moment, folder)
        log.append(f'{name}: exit {code}, logged to step {last_step(folder)}, checkpoints {checkpoint_steps(folder)}')
        if number == signal.SIGTERM:
            result = json.loads(output.splitlines()[-1])
            assert (code, result['stopped']) == (0, 'SIGTERM') and 14 <= result['step'] < RUN['train_steps'], output
            assert checkpoint_steps(folder)[-1] == result['step']
    code, output = training.run(model_dir=str(folder), **RUN)
    print(f'seed {seed}', *log, sep='\n  ')
    assert code == 0, output
    assert sum('exit -9' in line for line in log) >= 2, log
    assert difference(folder, uninterrupted, RUN['train_steps']) is None
    assert not [p for p in (folder / 'checkpoints').iterdir() if 'tmp' in p.name]


def test_simultaneous_signals_save_the_run(training, tmp_path):
    """As with Ctrl-C, if a launcher also sends SIGTERM to its run when it receives SIGINT."""
    settings = {**RUN, 'train_steps': 10**6, 'checkpoint_period': 10**6, 'eval_period': 10**6}
    folder = tmp_path / 'run'
    process = training.start(model_dir=str(folder), **settings)
    process.wait_until(lambda: last_step(folder) >= 7, 'step 7')
    # Stops the process first, so that it receives both signals at once.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send(number)
    assert process.wait() == 0 and len(checkpoint_steps(folder)) == 1


def test_a_run_that_is_stopped_in_evaluations_ends_bit_identical(tmp_path, monkeypatch):
    """An evaluation has three batches. The run evaluates at steps 0, 4, 8 and 10, the last step."""
    settings = {'train_steps': 10, 'eval_period': 4, 'eval_at_start': True, 'checkpoint_period': 4}
    tiny_training.run(str(tmp_path / 'uninterrupted'), **settings)
    check, signalled, outcomes = preemption.StopSignalHandler.raise_if_stopping, None, []

    def check_after_signal(stop):
        if next(calls) == signalled:
            signal.raise_signal(signal.SIGTERM)
        check(stop)

    monkeypatch.setattr(preemption.StopSignalHandler, 'raise_if_stopping', check_after_signal)
    for number in (2, 3 + 3, 3 + 3 + 1, None):
        calls, signalled = itertools.count(1), number
        result = tiny_training.run(str(tmp_path / 'run'), **settings)
        outcomes.append((result.step, result.stopped, next(calls) - 1))
    assert outcomes == [(0, 'SIGTERM', 2), (4, 'SIGTERM', 6), (10, 'SIGTERM', 7), (10, None, 3)], outcomes
    assert difference(tmp_path / 'run', tmp_path / 'uninterrupted', 10) is None


def test_the_newest_checkpoints_are_kept_and_record_the_length_buckets(uninterrupted):
    assert checkpoint_steps(uninterrupted) == [60, 70, 80]
    record = json.loads((uninterrupted / 'checkpoints/80/run/metadata').read_text())
    assert record['length_buckets'] == [10, 13]


def test_a_run_of_version_0_1_0_resumes(tmp_path):
    """The losses depend on the parameters, the optimizer state, the order of the examples and the noise in them."""
    shutil.unpack_archive(GOLDEN / 'resumable_run.tar.gz', tmp_path, filter='data')
    folder = tmp_path / 'run'
    expected = json.loads((folder / 'losses.json').read_text())
    tiny_training.run(str(folder), 12, **make_resumable_run.SETTINGS)
    losses = {record['step']: record['loss'] for record in read_log(folder) if record['kind'] == 'train'}
    assert list(losses) == list(range(1, 13))
    np.testing.assert_allclose(list(losses.values()), expected, rtol=1e-5)
