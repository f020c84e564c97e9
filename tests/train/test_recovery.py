"""Bad steps, failed writes, damaged checkpoints, locked folders and changed settings."""

import json
import math
import os
import pathlib
import shutil
import signal
from unittest import mock

import jax
import numpy as np
import pytest
from etils import epath

from remixer_t5x.checkpoints import compatibility
from remixer_t5x.interop import converted_checkpoint
from remixer_t5x.train import hooks, preemption, run_state
from tests.support import tiny_training
from tests.support.compare_runs import checkpoint_arrays, checkpoint_steps, difference, last_step, read_log
from tests.support.error_lines import printed_error

RUN = {'train_steps': 60, 'log_period': 1, 'eval_period': 30, 'checkpoint_period': 10}


def train(training, folder, **options):
    code, output = training.run(model_dir=str(folder), **{**RUN, **options})
    print(output)
    return code, output


def steps_of(folder):
    return [record['step'] for record in read_log(folder) if record['kind'] == 'train']


@pytest.mark.parametrize('policy', ['skip', 'rewind'])
def test_bad_batches_are_skipped_and_a_killed_run_ends_equal(training, tmp_path, policy):
    """In each epoch of 25 steps, one line makes the loss of its batch NaN, and one makes it a spike."""
    options = {'loss_factors': (math.nan, 500.0), 'recovery': {'on_bad_step': policy, 'spike_factor': 2.5}}
    folder, killed = tmp_path / 'run', tmp_path / 'killed'
    code, output = train(training, folder, quiet=False, **options)
    assert code == 0
    # Repeated steps are logged only once.
    assert steps_of(folder) == list(range(1, 61))
    skipped = sum(record.get('skipped', 0) for record in read_log(folder))
    if policy == 'skip':
        assert 4 <= skipped <= 6 and '1 skipped' in output
    else:
        assert skipped == 0 and 4 <= output.count('rewinding to step') <= 8
    assert all(np.isfinite(array).all() for array in checkpoint_arrays(folder, 60).values())

    process = training.start(model_dir=str(killed), **RUN, **options)
    process.wait_until(lambda: last_step(killed) >= 33, 'step 33')
    assert process.kill() == -signal.SIGKILL
    assert train(training, killed, **options)[0] == 0
    assert difference(killed, folder, 60) is None


def test_a_bad_step_stops_a_run_by_default_and_many_always_do(training, tmp_path):
    code, output = train(training, tmp_path / 'stop', nan_below=384)
    assert code == 2 and 'is not finite at step 1; no checkpoint has been saved yet' in printed_error(output)
    assert 'ON_BAD_STEP' in output and not read_log(tmp_path / 'stop')
    code, output = train(training, tmp_path / 'skip', nan_below=384, recovery={'on_bad_step': 'skip'})
    assert code == 2 and '20 steps in a row were skipped' in printed_error(output)
    code, output = train(training, tmp_path / 'rewind', nan_below=384, recovery={'on_bad_step': 'rewind'})
    assert code == 2 and 'was rewound to step 0 5 times' in printed_error(output)
    recovery = {'on_bad_step': 'rewind', 'on_save_failure': 'continue'}
    code, output = train(training, tmp_path / 'full', nan_below=384, recovery=recovery, file_size=300_000, embed=256)
    assert code == 2 and 'no earlier checkpoint could be written' in printed_error(output)


def test_a_run_that_is_stopped_after_a_bad_step_is_rewound(tmp_path, monkeypatch):
    """The metrics of the last step are checked only when the run saves."""
    monkeypatch.setattr(preemption.StopSignalHandler, 'get_agreed_signal', lambda handler: 'SIGTERM')
    result = tiny_training.run(str(tmp_path), 60, log_period=50, nan_below=384, recovery={'on_bad_step': 'rewind'})
    assert (result.step, result.stopped) == (0, 'SIGTERM') and checkpoint_steps(tmp_path) == [0]
    assert result.checkpoint == str(tmp_path / 'checkpoints' / '0')


def test_a_rewind_to_an_unevaluated_step_repeats_the_evaluation(tmp_path):
    """With a learning rate of 0, no evaluation is better than that at the start."""
    options = {'learning_rate': 0.0, 'eval_at_start': True, 'eval_period': 5, 'checkpoint_period': 20}
    tiny_training.run(str(tmp_path), 20, loss_factors=(math.nan,), recovery={'on_bad_step': 'rewind'}, **options)
    record = json.loads((tmp_path / 'checkpoints' / '20' / 'run' / 'metadata').read_text())
    assert (record['patience']['step'], record['patience']['since']) == (0, 4)
    assert [line['step'] for line in read_log(tmp_path) if line['kind'] == 'eval'] == [0, 5, 10, 15, 20]


@pytest.mark.parametrize('steps', [(20, 21, 22, 23), (20, 21, 11)])
def test_a_trace_ends_after_three_steps_or_a_rewind(steps, monkeypatch):
    calls = mock.Mock()
    monkeypatch.setattr(jax, 'profiler', calls)
    profiler = hooks.Profiler(epath.Path('profile'))
    profiler.start_trace(run_state.RunState(None, step=20))
    for step in steps:
        assert not calls.stop_trace.called
        profiler.stop_trace_if_due(step, None)
    calls.stop_trace.assert_called_once_with()


def test_a_failed_save_stops_the_run_or_is_retried(training, tmp_path):
    """The file size limit is less than the size of the largest array, so no checkpoint can be written."""
    folder, limit = tmp_path / 'run', {'file_size': 300_000, 'embed': 256}
    assert train(training, folder, train_steps=10, embed=256)[0] == 0
    code, output = train(training, folder, recovery={'on_save_failure': 'continue'}, quiet=False, **limit)
    assert code == 2 and 'could not be written' in printed_error(output) and 'step 10 is kept' in printed_error(output)
    assert output.count('training continues (ON_SAVE_FAILURE)') >= 3
    assert checkpoint_steps(folder) == [10] and steps_of(folder) == list(range(1, 61))
    assert train(training, folder, embed=256)[0] == 0
    assert checkpoint_steps(folder) == [40, 50, 60]


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_restored(training, tmp_path):
    """MODEL_DIR is a relative path or a link, and its name contains spaces and other letters."""
    finished, folder = tmp_path / 'with space ünïcode 模型', tmp_path / 'a link 链接'
    assert train(training, os.path.relpath(finished))[0] == 0
    json.loads(pathlib.Path(finished, 'remixer_t5x_run.json').read_text())
    shutil.copytree(finished, tmp_path / 'copy')
    folder.symlink_to(tmp_path / 'copy', target_is_directory=True)
    path = max((folder / 'checkpoints' / '60' / 'state').rglob('*'), key=lambda p: p.is_file() * p.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:9] + bytes([content[9] ^ 4]) + content[10:])
    code, output = train(training, folder, train_steps=70)
    error = printed_error(output)
    assert code == 2 and path.name in error and 'damaged' in error and '--restore=previous' in error and '50' in error
    assert checkpoint_steps(folder) == [40, 50, 60]
    code, output = train(training, folder, recovery={'restore': 'previous'}, quiet=False)
    assert code == 0 and 'resuming at step 50' in output and path.name in output
    assert (folder / 'damaged' / '60').is_dir()
    assert difference(folder, finished, 60) is None
    (folder / 'checkpoints' / '80' / 'state').mkdir(parents=True)
    assert train(training, folder, recovery={'restore': 'previous'})[0] == 0
    assert (folder / 'damaged' / '80').is_dir()
    # A run cannot resume from the output of `convert`.
    converted = converted_checkpoint.create_model_dir(tmp_path / 'converted')
    params, record, _ = converted_checkpoint.read_checkpoint(str(finished))
    converted_checkpoint.write_checkpoint(converted, params, 60, record)
    code, output = train(training, converted)
    error = printed_error(output)
    assert code == 2 and 'contains only parameters' in error and 'INITIAL_CHECKPOINT_PATH set to this one' in error


def test_a_second_run_in_a_used_folder_is_rejected(training, tmp_path):
    folder = tmp_path / 'run'
    first = training.start(model_dir=str(folder), **{**RUN, 'train_steps': 10**6})
    first.wait_until(lambda: last_step(folder) >= 3, 'step 3')
    code, output = train(training, folder, devices=8, mesh={'data': 8})
    assert code == 2 and f'is in use by process {first.pid} on ' in printed_error(output)
    assert first.running
    first.kill()


def test_changed_settings_are_described():
    old = (
        '# Macros:\nLEARNING_RATE = 0.001\nMODEL_DIR = \'a\'\nTRAIN_STEPS = 10\nx.y = \\\n    {"a": 1,\n     "b": 2}\n'
    )
    new = old.replace('0.001', '0.01').replace("'a'\nT", "'b'\nT").replace('"b": 2', '"b": 3')
    describe = compatibility.describe_config_changes
    assert describe(old, old) == '' == describe('', new)
    assert describe(old, new) == 'LEARNING_RATE 0.001 -> 0.01, x.y {"a": 1, "b": 2} -> {"a": 1, "b": 3}'
    assert describe(old, old.replace('TRAIN_STEPS = 10\n', '')) == 'TRAIN_STEPS 10 -> (absent)'
