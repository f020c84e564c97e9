"""Bad steps, checkpoints that cannot be written or read, and changed settings."""

import json
import math
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest

from remixer_t5x.checkpoints import changes
from remixer_t5x.errors import UserError
from remixer_t5x.train import settings
from tests.support.compare_runs import arrays, checkpoint_steps, difference, last_step, logged

RUN = {'train_steps': 60, 'log_period': 1, 'eval_period': 30, 'checkpoint_period': 10}


def error_of(output):
    (error,) = [line for line in output.splitlines() if line.startswith('error: ')]
    assert 'Traceback' not in output
    return error


def train(training, folder, **given):
    code, output = training.run(model_dir=str(folder), **{**RUN, **given})
    print(output)
    return code, output


def steps_of(folder):
    return [record['step'] for record in logged(folder) if record['kind'] == 'train']


@pytest.mark.parametrize('policy', ['skip', 'rewind'])
def test_bad_batches_are_skipped_and_a_killed_run_ends_the_same(training, tmp_path, policy):
    """One line of 200 makes the loss of its batch NaN and one makes it a spike, once in each epoch of 25 steps."""
    given = {'strange': (math.nan, 500.0), 'recovery': {'on_bad_step': policy, 'spike_factor': 2.5}}
    folder, broken = tmp_path / 'run', tmp_path / 'broken'
    code, output = train(training, folder, quiet=False, **given)
    assert code == 0
    # Every step is logged once, also steps that were taken twice.
    assert steps_of(folder) == list(range(1, 61))
    skipped = sum(record.get('skipped', 0) for record in logged(folder))
    if policy == 'skip':
        assert 4 <= skipped <= 6 and '1 skipped' in output
    else:
        assert skipped == 0 and 4 <= output.count('without the batches since then') <= 8
    assert all(np.isfinite(array).all() for array in arrays(folder, 60).values())

    process = training.start(model_dir=str(broken), **RUN, **given)
    process.until(lambda: last_step(broken) >= 33, 'step 33')
    assert process.kill() == -signal.SIGKILL
    assert train(training, broken, **given)[0] == 0
    assert difference(broken, folder, 60) is None


def test_a_bad_step_stops_by_default_and_too_many_stop_always(training, tmp_path):
    code, output = train(training, tmp_path / 'stop', strange=(math.nan,))
    assert code == 2 and 'is not finite at step' in error_of(output) and 'ON_BAD_STEP' in output
    recovery = {'on_bad_step': 'skip'}
    code, output = train(training, tmp_path / 'skip', nan_below=384, recovery=recovery)
    assert code == 2 and '20 steps in a row were skipped' in error_of(output)
    recovery = {'on_bad_step': 'rewind'}
    code, output = train(training, tmp_path / 'rewind', nan_below=384, recovery=recovery)
    assert code == 2 and 'went back to step 0 5 times' in error_of(output)


def test_training_continues_if_a_checkpoint_cannot_be_written(training, tmp_path):
    """Files may not be as large as the largest array, so no checkpoint can be written."""
    folder = tmp_path / 'run'
    assert train(training, folder, train_steps=10, embed=256)[0] == 0
    recovery = {'on_save_failure': 'go_on'}
    code, output = train(training, folder, recovery=recovery, file_size=300_000, embed=256, quiet=False)
    assert code == 2 and 'could not be written' in error_of(output)
    assert output.count('training continues (ON_SAVE_FAILURE)') >= 3
    assert checkpoint_steps(folder) == [10] and steps_of(folder) == list(range(1, 61))
    assert train(training, folder, embed=256)[0] == 0
    assert checkpoint_steps(folder) == [40, 50, 60]


@pytest.fixture(scope='module')
def finished(training, tmp_path_factory):
    folder = tmp_path_factory.mktemp('finished') / 'run'
    assert train(training, folder)[0] == 0
    return folder


@pytest.mark.parametrize('damage', ['cut', 'flipped', 'missing'])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_restored(training, finished, tmp_path, damage):
    folder = tmp_path / 'run'
    shutil.copytree(finished, folder)
    path = max((folder / 'checkpoints' / '60' / 'state').rglob('*'), key=lambda p: p.is_file() * p.stat().st_size)
    content = path.read_bytes()
    if damage == 'missing':
        path.unlink()
    else:
        path.write_bytes(content[:-9] if damage == 'cut' else content[:9] + bytes([content[9] ^ 4]) + content[10:])
    code, output = train(training, folder, train_steps=70)
    error = error_of(output)
    assert code == 2 and path.name in error and 'damaged' in error and '--restore previous' in error and '50' in error
    assert checkpoint_steps(folder) == [40, 50, 60]
    recovery = {'restore': 'previous'}
    code, output = train(training, folder, recovery=recovery, quiet=False)
    assert code == 0 and 'resuming at step 50' in output and path.name in output
    assert (folder / 'damaged' / '60').is_dir()
    assert difference(folder, finished, 60) is None


def test_a_second_run_in_the_folder_is_refused(training, tmp_path):
    folder = tmp_path / 'run'
    first = training.start(model_dir=str(folder), **{**RUN, 'train_steps': 10**6})
    first.until(lambda: last_step(folder) >= 3, 'step 3')
    code, output = train(training, folder, devices=8, mesh={'data': 8})
    assert code == 2 and f'is in use by process {first.pid} on ' in error_of(output)
    assert first.running
    first.kill()
    # Nothing of the killed run's lock is left.
    assert train(training, folder, train_steps=last_step(folder) + 5)[0] == 0


def test_a_folder_may_be_relative_and_a_link_and_have_any_name(training, finished, tmp_path):
    folder = tmp_path / 'a link 链接'
    (tmp_path / 'with space ünïcode 模型').mkdir()
    folder.symlink_to(tmp_path / 'with space ünïcode 模型', target_is_directory=True)
    assert train(training, os.path.relpath(folder), train_steps=30)[0] == 0
    assert train(training, folder)[0] == 0
    assert logged(folder)[:30] == logged(finished)[:30] and checkpoint_steps(folder) == [40, 50, 60]
    json.loads(pathlib.Path(folder, 'remixer_t5x_run.json').read_text())


def test_changed_settings_are_described():
    old = (
        '# Macros:\nLEARNING_RATE = 0.001\nMODEL_DIR = \'a\'\nTRAIN_STEPS = 10\nx.y = \\\n    {"a": 1,\n     "b": 2}\n'
    )
    new = old.replace('0.001', '0.01').replace('"a"\nT', '"b"\nT').replace('"b": 2', '"b": 3')
    describe = changes.describe_config
    assert describe(old, old) == '' == describe('', new)
    assert describe(old, new) == 'LEARNING_RATE 0.001 -> 0.01, x.y {"a": 1, "b": 2} -> {"a": 1, "b": 3}'
    assert describe(old, old.replace('TRAIN_STEPS = 10\n', '')) == 'TRAIN_STEPS 10 -> (absent)'


@pytest.mark.parametrize(
    ('changed', 'words'),
    [
        ({'on_bad_step': 'ignore'}, "ON_BAD_STEP must be 'stop' or 'skip' or 'rewind', got 'ignore'"),
        ({'restore': 3}, "RESTORE must be 'newest' or 'previous', got 3"),
        ({'on_save_failure': None}, 'ON_SAVE_FAILURE must be .*, got None'),
        ({'spike_factor': 1}, 'SPIKE_FACTOR must be a number above 1 or None, got 1'),
        ({'spike_factor': 'big'}, "SPIKE_FACTOR must be a number above 1 or None, got 'big'"),
    ],
)
def test_settings_of_recovery_are_checked(changed, words):
    with pytest.raises(UserError, match=words):
        settings.Recovery(**changed)
