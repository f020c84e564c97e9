"""Complete runs: files, output, errors, meshes and settings. test_resume tests bit-identical resumption."""

import json
import pathlib

import numpy as np
import pytest

from remixer_t5x.checkpoints import compatibility
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import trackers
from remixer_t5x.train import progress, settings
from tests.support.error_lines import printed_error

LOSSES = ('loss', 'accuracy', 'grad_norm')


def records(folder, kind='train'):
    lines = pathlib.Path(folder, 'metrics.jsonl').read_text().splitlines()
    return [record for record in map(json.loads, lines) if record['kind'] == kind]


def test_a_run_learns_and_writes_its_folder(training, tmp_path):
    folder = tmp_path / 'run'
    code, output = training.run(model_dir=str(folder), train_steps=30, checkpoint_period=10, keep=2, quiet=False)
    assert code == 0, output
    train, held_out = records(folder), records(folder, 'eval')
    assert [r['step'] for r in train] == list(range(3, 31, 3)) and [r['step'] for r in held_out] == [10, 20, 30]
    assert train[-1]['loss'] < train[0]['loss'] - 2
    assert held_out[-1]['perplexity'] == pytest.approx(np.exp(held_out[-1]['cross_ent_loss']))
    assert train[0]['learning_rate'] == pytest.approx(1e-2) and train[0]['timing']['tokens_per_second'] > 0
    assert sorted(p.name for p in (folder / 'checkpoints').iterdir()) == ['20', '30']
    assert (folder / 'config.gin').read_text() == '# tiny\n'
    record = json.loads((folder / 'checkpoints' / '30' / 'run' / 'metadata').read_text())
    assert {*compatibility.FIXED_SETTINGS, 'vocabulary', 'data'} - {'length_buckets'} <= {*record}
    assert list((folder / 'tensorboard').iterdir())
    assert 'step 30/30 · loss' in output and 'held-out loss' in output
    result = json.loads(output.splitlines()[-1])
    assert result['step'] == 30 and result['stopped'] is None and result['train'] == train[-1]
    assert 0 < train[-1]['non_padding_fraction'] < 1 and train[-1]['timing']['data_wait_seconds'] >= 0
    assert set(result['seconds_by_activity']) == {
        *(progress.STEPS, progress.WAITING_FOR_DATA, progress.COMPILE, progress.RESTORING_STATE),
        *(progress.EVALUATION, progress.CHECKPOINT, progress.OTHER_ACTIVITIES),
    }

    code, output = training.run(model_dir=str(folder), train_steps=30, quiet=False)
    assert code == 0 and 'is already at step 30' in output and records(folder) == train

    code, output = training.run(model_dir=str(folder), train_steps=60, batch_size=4)
    assert code == 2 and 'BATCH_SIZE = 8, but this run uses 4' in printed_error(output)
    assert records(folder) == train

    # With an infinite learning rate, the parameters are infinite after one step, and the loss is NaN in the next step.
    code, output = training.run(model_dir=str(folder), train_steps=60, learning_rate=float('inf'))
    error = printed_error(output)
    assert code == 2 and 'not finite at step' in error and 'the last good checkpoint is step 30' in error
    assert sorted(p.name for p in (folder / 'checkpoints').iterdir()) == ['20', '30']


def test_a_run_without_data_positions_resumes(training, tmp_path):
    run = {'model_dir': str(tmp_path / 'run'), 'log_period': 1, 'quiet': False}
    for steps, message in ((2, 'starting at step 0'), (4, 'resuming at step 2')):
        code, output = training.run(train_steps=steps, save_position=False, **run)
        assert code == 0, output
        assert output.count('the data position is not saved') == 1 and message in output
    losses = [record['loss'] for record in records(tmp_path / 'run')]
    assert len(losses) == 4 and np.isfinite(losses).all()
    # A run that saves its position cannot resume from this checkpoint.
    code, output = training.run(train_steps=6, **run)
    assert code == 2 and 'contains no data position' in printed_error(output)


def test_bad_data_in_the_middle_of_a_run_raises_a_one_line_error(training, tmp_path):
    code, output = training.run(model_dir=str(tmp_path / 'run'), train_steps=60, poison='line 30 ab')
    assert code == 2 and 'notes.jsonl line 7 is not JSON' in printed_error(output)


def test_errors_are_raised_before_a_folder_is_created(training, tmp_path):
    code, output = training.run(model_dir=str(tmp_path / 'run'), train_steps=5, vocab_size=128)
    assert code == 2 and 'set VOCAB_SIZE to 384' in printed_error(output)
    assert not (tmp_path / 'run').exists()


def test_a_run_resumes_on_other_meshes_with_equal_losses(training, tmp_path):
    """10 steps on each of two meshes of 8 devices and on one device equal 30 steps on one device."""
    options = {'dropout_rate': 0.0, 'eval_period': 100, 'checkpoint_period': 10}
    folder, alone = tmp_path / 'run', tmp_path / 'alone'
    assert training.run(model_dir=str(alone), train_steps=30, **options)[0] == 0
    for steps, devices, mesh in ((10, 8, {'data': 8}), (20, 8, {'data': 2, 'fsdp': 2, 'tensor': 2}), (30, 1, {})):
        code, output = training.run(model_dir=str(folder), train_steps=steps, devices=devices, mesh=mesh, **options)
        assert code == 0, output
    # Runs that end at steps 10 and 20 also log there, so their next windows are shorter.
    ours = {r['step']: r for r in records(folder)}
    for theirs in records(alone):
        if theirs['step'] in (12, 21):
            continue
        np.testing.assert_allclose([ours[theirs['step']][k] for k in LOSSES], [theirs[k] for k in LOSSES], rtol=2e-4)


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (lambda: settings.Recovery(on_bad_step='ignore'), "ON_BAD_STEP must be 'stop', 'skip' or 'rewind', got 'ig"),
        *(
            (lambda option=option: settings.Folder('runs/a', **option), f'INITIAL_CHECKPOINT_PATH .* if {name} is set')
            for name, option in (
                ('FRESH_PARAMETERS', {'fresh_parameters': 'mixer'}),
                ('INITIAL_CHECKPOINT_MAP', {'checkpoint_map': {'.*': None}}),
                ('INITIAL_VOCABULARY', {'initial_vocabulary': object()}),
            )
        ),
        (
            lambda: settings.Run(None, None, None, settings.Periods(10), trackers=(trackers.TensorBoard,)),
            r'TRACKERS must be a tuple of trackers, as in \(@trackers.TensorBoard\(\),\)',
        ),
        (
            lambda: settings.Run(None, None, None, settings.Periods(10, eval_period=None, eval_at_start=True), None),
            'EVAL_AT_START require evaluations',
        ),
    ],
)
def test_settings_are_validated(build, message):
    with pytest.raises(UserError, match=message):
        build()
