"""Whole runs: what they write and print, what stops them, and other meshes. Bit-equal resume is in test_resume."""

import json
import pathlib
from unittest import mock

import numpy as np
import pytest

from remixer_t5x.errors import UserError
from remixer_t5x.train import hooks, loop, progress, settings
from remixer_t5x.train.saving import Patience

LOSSES = ('loss', 'accuracy', 'grad_norm')


def records(folder, kind='train'):
    lines = pathlib.Path(folder, 'metrics.jsonl').read_text().splitlines()
    return [record for record in map(json.loads, lines) if record['kind'] == kind]


def error_of(output):
    lines = output.splitlines()
    assert 'Traceback' not in output
    (error,) = [line for line in lines if line.startswith('error: ')]
    return error


def test_a_run_learns_and_leaves_everything_in_its_folder(training, tmp_path):
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
    assert list((folder / 'tensorboard').iterdir())
    assert 'step 30/30 · loss' in output and 'held-out loss' in output
    result = json.loads(output.splitlines()[-1])
    assert result['step'] == 30 and result['stopped'] is None and result['train'] == train[-1]
    assert 0 < train[-1]['non_padding_fraction'] < 1 and train[-1]['timing']['data_wait_seconds'] >= 0
    spent = json.loads((folder / 'goodput.jsonl').read_text())
    assert (spent['first'], spent['last']) == (0, 30) and spent['seconds'] == pytest.approx(result['spent'], abs=1e-3)
    assert set(spent['seconds']) == {
        *(progress.STEPS, progress.DATA, progress.COMPILE, progress.STATE, progress.EVALUATION, progress.CHECKPOINT),
        progress.OTHER,
    }

    again, output = training.run(model_dir=str(folder), train_steps=30, quiet=False)
    assert again == 0 and 'is at step 30 already' in output and records(folder) == train

    # Another run starts from the parameters of this one.
    other = tmp_path / 'other'
    code, output = training.run(model_dir=str(other), train_steps=3, initial=str(folder))
    assert code == 0, output
    first = records(other)[0]
    assert first['step'] == 3 and first['loss'] < train[-1]['loss'] + 0.5

    code, output = training.run(model_dir=str(folder), train_steps=60, batch_size=4)
    assert code == 2 and 'BATCH_SIZE = 8 and this run has 4' in error_of(output)
    code, output = training.run(model_dir=str(folder), train_steps=60, vocab_size=512)
    assert code == 2 and 'does not fit this model' in error_of(output)
    assert records(folder) == train


def test_nan_stops_the_run_and_the_last_good_checkpoint_stays(training, tmp_path):
    """An infinite learning rate makes infinite parameters out of finite gradients in step 1, and NaN in step 2."""
    folder = tmp_path / 'run'
    assert training.run(model_dir=str(folder), train_steps=5)[0] == 0
    code, output = training.run(model_dir=str(folder), train_steps=60, learning_rate=float('inf'))
    error = error_of(output)
    print(error)
    assert code == 2 and 'not finite at step' in error and 'the last good checkpoint is step 5' in error
    assert [p.name for p in (folder / 'checkpoints').iterdir()] == ['5']
    # Losses that are NaN from the first step on.
    code, output = training.run(model_dir=str(tmp_path / 'nan'), train_steps=60, nan_below=384)
    assert code == 2 and 'at step 1; no checkpoint was saved yet' in error_of(output)
    assert not records(tmp_path / 'nan')


def test_a_generator_is_read_if_the_position_is_not_saved(training, tmp_path):
    run = {'model_dir': str(tmp_path / 'run'), 'generator': True, 'log_period': 1, 'quiet': False}
    code, output = training.run(train_steps=2, **run)
    assert code == 2 and 'whose position cannot be saved' in error_of(output)
    assert 'give SAVE_DATA_POSITION=False' in error_of(output)
    for steps, message in ((2, 'starting at step 0'), (4, 'resuming at step 2')):
        code, output = training.run(train_steps=steps, save_position=False, **run)
        assert code == 0, output
        assert output.count('the position in the data is not saved') == 1 and message in output
    losses = [record['loss'] for record in records(tmp_path / 'run')]
    assert len(losses) == 4 and np.isfinite(losses).all()
    # A run that saves its position cannot resume there.
    code, output = training.run(train_steps=6, **{**run, 'generator': False})
    assert code == 2 and 'has no saved data position' in error_of(output)


def test_hooks_are_prepared_once_after_the_first_step():
    events = []

    def step(state, batch):
        events.append(batch)
        return state, {}

    evaluation = hooks.Hook(3, lambda now: events.append('call'), prepare=lambda: events.append('prepare'))
    others = {name: mock.MagicMock() for name in ('bad_steps', 'saver', 'profiler', 'log')}
    others['log'].clock.pause = mock.MagicMock()
    stop = mock.MagicMock(agreed_signal=lambda step: None)
    now = mock.MagicMock(step=0, patience=Patience())
    loop.Loop(step, iter(['first', 'second', 'third']), [evaluation], **others).run(now, 3, stop)
    assert events == ['first', 'prepare', 'second', 'third', 'call']


@pytest.mark.parametrize(('saved', 'calls'), [(None, 1), (0, 0)])
def test_hooks_are_called_at_the_start_of_new_runs_only(saved, calls):
    """A run that goes back to its first checkpoint has a checkpoint of step 0."""
    events = []
    hook = hooks.Hook(None, lambda now: events.append(now.step), at_start=True)
    others = {name: mock.MagicMock() for name in ('bad_steps', 'saver', 'profiler', 'log')}
    now = mock.MagicMock(step=0, saved_step=saved, patience=Patience())
    stop = mock.MagicMock(agreed_signal=lambda step: None)
    loop.Loop(lambda state, batch: (state, {}), iter(['only']), [hook], **others).run(now, 1, stop)
    assert events == [0] * calls


def test_bad_data_in_the_middle_of_a_run_is_reported_in_one_line(training, tmp_path):
    code, output = training.run(model_dir=str(tmp_path / 'run'), train_steps=60, poison='line 30 ab')
    assert code == 2 and 'notes.jsonl line 7 is not JSON' in error_of(output)


@pytest.mark.parametrize(
    ('changed', 'words'),
    [({'vocab_size': 128}, 'set VOCAB_SIZE to 384'), ({'microbatches': 3}, 'BATCH_SIZE must be a multiple of 3')],
)
def test_mistakes_are_reported_before_a_folder_is_created(training, tmp_path, changed, words):
    code, output = training.run(model_dir=str(tmp_path / 'run'), train_steps=5, **changed)
    assert code == 2 and words in error_of(output)
    assert not (tmp_path / 'run').exists()


def test_other_meshes_continue_with_the_same_numbers(training, tmp_path):
    """8 devices for 10 steps, other 8-device mesh to 20, one device to 30: the same as one device for 30."""
    settings_ = {'dropout_rate': 0.0, 'eval_period': 100, 'checkpoint_period': 10}
    folder, alone = tmp_path / 'run', tmp_path / 'alone'
    assert training.run(model_dir=str(alone), train_steps=30, **settings_)[0] == 0
    for steps, devices, mesh in ((10, 8, {'data': 8}), (20, 8, {'data': 2, 'fsdp': 2, 'tensor': 2}), (30, 1, {})):
        code, output = training.run(model_dir=str(folder), train_steps=steps, devices=devices, mesh=mesh, **settings_)
        assert code == 0, output
    # A run that ends at step 10 logs there too; apart from that the steps are the same.
    ours = {r['step']: r for r in records(folder)}
    for theirs in records(alone):
        if theirs['step'] in (12, 21):
            continue
        np.testing.assert_allclose([ours[theirs['step']][k] for k in LOSSES], [theirs[k] for k in LOSSES], rtol=2e-4)


def test_settings_of_periods_are_checked():
    with pytest.raises(UserError, match='LOG_PERIOD must be a whole number of at least 1, got 0'):
        settings.Periods(10, log_period=0)
    with pytest.raises(UserError, match="TRAIN_STEPS must be .* got '10'"):
        settings.Periods('10')
    assert settings.Periods(10, eval_period=None).eval_period is None
    with pytest.raises(UserError, match='EVAL_AT_START must be True or False, got 1'):
        settings.Periods(10, eval_at_start=1)
    at_start = settings.Periods(10, eval_period=None, eval_at_start=True)
    with pytest.raises(UserError, match='EVAL_AT_START needs evaluations'):
        settings.Run(None, None, None, at_start, None)
    with pytest.raises(UserError, match='EVAL_PERIOD = None'):
        settings.Run(None, None, None, settings.Periods(10), None)


def test_a_hook_is_due_at_its_period_and_at_the_end():
    hook = hooks.Hook(4, print)
    assert [step for step in range(1, 11) if hook.is_due(step, 10)] == [4, 8, 10]
    assert not any(hooks.Hook(None, print).is_due(step, 10) for step in range(1, 11))
    assert [step for step in range(1, 11) if hooks.Hook(4, print, at_end=False).is_due(step, 10)] == [4, 8]
