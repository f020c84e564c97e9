"""Finding checkpoints by path, and following those that a run writes."""

import shutil
import types

import jax
import pytest

from remixer_t5x.checkpoints import checkpoint_paths, saved_params
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate.checkpoint_evaluation import CheckpointEvaluator
from tests.support import saved_run


def save(folder, *steps):
    for step in steps:
        (folder / 'checkpoints' / str(step) / 'state').mkdir(parents=True)


def names(paths):
    return [path.name for path in paths]


def test_a_path_selects_a_checkpoint_or_the_newest_complete_one_of_a_run(tmp_path):
    save(tmp_path / 'a', 5, 100, 20)
    save(tmp_path / 'b', 7)
    (tmp_path / 'b' / 'checkpoints' / '10').mkdir()
    (tmp_path / 'b' / 'checkpoints' / '12.orbax-checkpoint-tmp' / 'state').mkdir(parents=True)
    paths = f'{tmp_path}/a/checkpoints/5, {tmp_path}/a, {tmp_path}/b/checkpoints'
    assert names(checkpoint_paths.find_checkpoints(paths)) == ['5', '100', '7']


@pytest.mark.parametrize(
    ('path', 'line'),
    [
        ('runn', 'did you mean run?'),
        ('run/checkpoints/90', 'use the MODEL_DIR of a run that has saved a checkpoint'),
        ('run,run/checkpoints/100', 'each of a different step'),
    ],
)
def test_a_wrong_path_raises_an_error(tmp_path, path, line):
    save(tmp_path / 'run', 5, 100)
    paths = ','.join(f'{tmp_path}/{part}' for part in path.split(','))
    with pytest.raises(UserError) as error:
        checkpoint_paths.find_checkpoints(paths)
    assert line in str(error.value)


@pytest.mark.parametrize('when', ['opened', 'read'])
def test_a_checkpoint_that_its_run_removes_while_it_is_read_is_not_called_damaged(tmp_path, monkeypatch, when):
    saved_run.write_run(tmp_path / 'run', steps=(5,))

    def remove(argument, *_):
        shutil.rmtree(tmp_path / 'run/checkpoints/5')
        return argument

    if when == 'opened':
        monkeypatch.setattr(saved_params, 'verify_checkpoint_files', remove)
    else:
        monkeypatch.setattr(saved_params.parameter_averages, 'select_saved_arrays', remove)
    with pytest.raises(UserError, match='was removed while it was being read.*KEEP_CHECKPOINTS'):
        saved = saved_params.open_checkpoint(str(tmp_path / 'run'))
        saved.read(dict.fromkeys(saved.shapes, jax.ShapeDtypeStruct((), jax.numpy.float32)))


class FakeTime:
    """A substitute for the module `time`, whose `sleep` calls `on_sleep` and returns immediately."""

    def __init__(self, on_sleep=lambda: None):
        self.now, self._on_sleep = 0.0, on_sleep

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self._on_sleep()


def test_following_yields_each_new_checkpoint_once(tmp_path, monkeypatch):
    save(tmp_path, 10)
    later = iter((20, 30))
    monkeypatch.setattr(checkpoint_paths, 'time', FakeTime(lambda: save(tmp_path, next(later))))
    followed = checkpoint_paths.follow_checkpoints(str(tmp_path), timeout=20, until=30, poll=0.01)
    assert names(followed) == ['10', '20', '30']


def test_following_skips_evaluated_steps_and_ends_after_the_timeout(tmp_path, monkeypatch):
    save(tmp_path, 10, 20, 30)
    clock = FakeTime()
    monkeypatch.setattr(checkpoint_paths, 'time', clock)
    assert names(checkpoint_paths.follow_checkpoints(str(tmp_path), timeout=0.1, skipped={10, 30}, poll=0.01)) == ['20']
    assert clock.now == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize('is_removed', [True, False])
def test_following_skips_a_checkpoint_that_is_being_removed_but_not_a_damaged_one(tmp_path, monkeypatch, is_removed):
    """Some files of the checkpoint are missing when the evaluation reads it."""
    save(tmp_path, 10, 20)
    folder = checkpoint_paths.find_checkpoint(f'{tmp_path}/checkpoints/10')
    monkeypatch.setattr(checkpoint_paths, 'time', FakeTime(folder.rmtree if is_removed else lambda: None))
    settings = types.SimpleNamespace(follow=1.0)
    evaluator = types.SimpleNamespace(_settings=settings, _abstract={}, _vocabulary=None)
    if is_removed:
        assert CheckpointEvaluator.restore_params(evaluator, folder) is None
    else:
        with pytest.raises(UserError, match='is damaged: run/metadata is missing'):
            CheckpointEvaluator.restore_params(evaluator, folder)


def test_an_unreadable_folder_does_not_hide_the_error_of_reading_a_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 10)
    folder = checkpoint_paths.find_checkpoint(str(tmp_path))

    def raise_error(_):
        raise OSError('no network')

    def verify(_):
        monkeypatch.setattr(checkpoint_paths, 'is_complete_checkpoint', raise_error)
        raise UserError('gs://bucket cannot be read')

    monkeypatch.setattr(saved_params, 'verify_checkpoint_files', verify)
    with pytest.raises(UserError, match='cannot be read'):
        saved_params.open_checkpoint(str(folder))
