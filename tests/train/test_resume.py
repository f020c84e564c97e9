"""A run that is killed anywhere and restarted ends bit-identical to an uninterrupted run.

The processes are real, and killed by real signals at random moments (the seed and the moments are printed).
"""

import json
import random
import signal
import time

import pytest

from tests.support.compare_runs import checkpoint_steps, difference, last_step, logged

RUN = {
    'train_steps': 80,
    'log_period': 7,
    'eval_period': 25,
    'checkpoint_period': 10,
    'dropout_rate': 0.1,
    'eval_at_start': True,
}


def start_and_signal(training, number, moment, folder):
    """Starts the run, sends the signal `number` once `moment()` is true, and returns exit code and output."""
    process = training.start(model_dir=str(folder), **RUN)
    process.until(lambda: moment() or not process.running, 'the moment of the signal')
    process.send(number)
    return process.wait(), process.output()


@pytest.fixture(scope='module')
def unbroken(training, tmp_path_factory):
    folder = tmp_path_factory.mktemp('unbroken') / 'run'
    code, output = training.run(model_dir=str(folder), **RUN)
    assert code == 0, output
    return folder


def test_a_run_killed_at_random_times_ends_bit_identical(training, unbroken, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    chosen, folder, log = random.Random(seed), tmp_path / 'run', []

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
        ('after the evaluation at the start', lambda: bool(logged(folder))),
        ('while a checkpoint is written', writing),
    ]
    step, delay = chosen.randrange(15, 60), chosen.random() * 0.02
    moments.append((f'{1000 * delay:.1f} ms after step {step} was logged', after_step(step, delay)))
    for name, moment in moments:
        code, _ = start_and_signal(training, signal.SIGKILL, moment, folder)
        log.append(f'{name}: exit {code}, logged to step {last_step(folder)}, checkpoints {checkpoint_steps(folder)}')
    code, output = training.run(model_dir=str(folder), **RUN)
    print(f'seed {seed}', *log, sep='\n  ')
    assert code == 0, output
    assert sum('exit -9' in line for line in log) >= 2, log
    assert difference(folder, unbroken, RUN['train_steps']) is None
    assert not [p for p in (folder / 'checkpoints').iterdir() if 'tmp' in p.name]


def test_sigterm_saves_the_step_and_the_run_resumes_bit_identical(training, unbroken, tmp_path):
    folder = tmp_path / 'run'
    code, output = start_and_signal(training, signal.SIGTERM, lambda: last_step(folder) >= 14, folder)
    assert code == 0, output
    result = json.loads(output.splitlines()[-1])
    assert result['stopped'] == 'SIGTERM' and 14 <= result['step'] < RUN['train_steps']
    assert checkpoint_steps(folder)[-1] == result['step']
    code, output = training.run(model_dir=str(folder), **RUN)
    assert code == 0, output
    assert difference(folder, unbroken, RUN['train_steps']) is None


def test_a_second_signal_ends_the_process_at_once(training, tmp_path):
    settings = {**RUN, 'train_steps': 10**6, 'checkpoint_period': 10**6, 'eval_period': 10**6}
    folder = tmp_path / 'run'
    process = training.start(model_dir=str(folder), **settings)
    process.until(lambda: last_step(folder) >= 7, 'step 7')
    # Stops the process first, so that it receives both signals at once.
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
        process.send(number)
    assert process.wait() in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_the_newest_checkpoints_are_kept(unbroken):
    assert checkpoint_steps(unbroken) == [60, 70, 80]
