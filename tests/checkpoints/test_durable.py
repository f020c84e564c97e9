"""Checkpoint folders: committed last and synced first, and every damage to a file is named."""

import json
import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remixer_t5x.checkpoints import durable, manager, saved_params
from remixer_t5x.data.prefetch import Position
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import model_dir

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
STATE = {'w': jnp.arange(512.0), 'step': jnp.int32(4)}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """The folder of one checkpoint, and the calls that put it on the disk, in order."""
    calls = []
    folder = model_dir.claim(tmp_path_factory.mktemp('durable') / 'run')
    with pytest.MonkeyPatch.context() as patch:
        sync, rename = os.fsync, os.replace

        def fsync(descriptor):
            calls.append(('sync', os.readlink(f'/proc/self/fd/{descriptor}')))
            sync(descriptor)

        def noted_rename(old, new):
            calls.append(('rename', str(old), str(new)))
            rename(old, new)

        patch.setattr(durable.os, 'fsync', fsync)
        patch.setattr(durable.os, 'replace', noted_rename)
        with_manager = manager.Checkpoints(folder)
        with_manager.save(4, STATE, Position(), {'window': {}})
        with_manager.close()
    return folder / 'checkpoints' / '4', calls


def test_everything_is_synced_before_the_rename_and_the_folders_above_after_it(written):
    folder, calls = written
    (commit,) = [i for i, call in enumerate(calls) if call[0] == 'rename' and call[2] == str(folder)]
    temporary = calls[commit][1]
    synced = {call[1] for call in calls[:commit]}
    below = [path for path in pathlib.Path(folder).rglob('*')]
    assert len(below) > 10 and folder / durable.FILE_LIST in below
    for path in [folder, *below]:
        assert str(path).replace(str(folder), temporary) in synced, path
    assert [call[1] for call in calls[commit + 1 :]] == [str(parent) for parent in list(folder.parents)[:3]]


def test_as_written_is_fine(written):
    durable.check_files(written[0])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_any_file_is_named(written, tmp_path, data):
    copy = tmp_path / 'copy'
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(written[0], copy)
    files = sorted(path for path in copy.rglob('*') if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    kind = data.draw(st.sampled_from(['flip', 'cut', 'missing', 'longer'] if content else ['missing', 'longer']))
    if kind == 'flip':
        at = data.draw(st.integers(0, len(content) - 1))
        bit = 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
    elif kind == 'cut':
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    elif kind == 'longer':
        path.write_bytes(content + b'x')
    else:
        path.unlink()
    with pytest.raises(durable.DamagedCheckpoint) as raised:
        durable.check_files(copy)
    assert '\n' not in str(raised.value)
    if path.name != durable.FILE_LIST:
        assert path.relative_to(copy).as_posix() in str(raised.value)


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    checkpoints = manager.Checkpoints(model_dir.claim(tmp_path / 'run'))
    bad = {**STATE, 'w': STATE['w'].at[7].set(jnp.nan)}
    checkpoints.save(1, bad, Position(), {'window': {}})
    checkpoints.wait()
    with pytest.raises(durable.DamagedCheckpoint, match='not finite, first in w'):
        checkpoints.restore(1, bad)
    checkpoints.close()


def test_a_failed_write_in_the_background_is_told_and_keeps_the_one_before(tmp_path, monkeypatch):
    """With room for one checkpoint only: the old one goes when the new one is committed, and not before."""
    checkpoints = manager.Checkpoints(model_dir.claim(tmp_path / 'run'), keep=1)
    checkpoints.save(1, STATE, Position(), {'window': {}})
    checkpoints.wait()

    def fail(written, final):
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(durable, 'commit', fail)
        checkpoints.save(2, STATE, Position(), {'window': {}})
        with pytest.raises(manager.SaveFailed, match='no space left on the disk'):
            checkpoints.save(3, STATE, Position(), {'window': {}})
    assert checkpoints.latest_step() == 1
    durable.check_files(checkpoints.folder / '1')
    checkpoints.reopen()
    checkpoints.save(4, STATE, Position(), {'window': {}})
    checkpoints.close()
    # The one before is gone, and so is what the failed write left.
    assert [path.name for path in checkpoints.folder.iterdir()] == ['4']


def test_one_folder_takes_one_run(tmp_path):
    folder = model_dir.claim(tmp_path / 'run')
    with model_dir.locked(folder):
        with pytest.raises(UserError, match=f'in use by process {os.getpid()} on '):
            with model_dir.locked(folder):
                pass
    with model_dir.locked(folder):
        pass


@pytest.mark.parametrize('how', ['missing', 'cut', 'flipped'])
def test_damage_to_any_file_is_damage_to_whoever_starts_a_run(written, tmp_path, how):
    """Also where the damaged file is one by which arrays are described: it is not taken for a hostile checkpoint."""
    names = [path.relative_to(written[0]) for path in pathlib.Path(written[0]).rglob('*') if path.is_file()]
    assert any(name.name == 'manifest.ocdbt' for name in names)
    for number, name in enumerate(sorted(names)):
        folder = tmp_path / str(number)
        shutil.copytree(written[0], folder)
        content = (folder / name).read_bytes()
        if how == 'missing':
            (folder / name).unlink()
        else:
            half = len(content) // 2
            (folder / name).write_bytes(content[:half] if how == 'cut' else bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(durable.DamagedCheckpoint, match='is damaged'):
            saved_params.verify_files(epath.Path(folder), listed=True)


def test_a_list_that_names_files_outside_is_hostile(written, tmp_path):
    folder = tmp_path / 'copy'
    shutil.copytree(written[0], folder)
    listed = json.loads((folder / durable.FILE_LIST).read_text())
    (folder / durable.FILE_LIST).write_text(json.dumps({**listed, '../../other': [1, 'a']}))
    with pytest.raises(UserError, match='outside') as error:
        saved_params.verify_files(epath.Path(folder), listed=True)
    assert not isinstance(error.value, durable.DamagedCheckpoint)
