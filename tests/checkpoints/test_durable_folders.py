"""Checkpoint folders are synced before they are committed, and damaged files are named."""

import json
import os
import pathlib
import shutil

import jax.numpy as jnp
import pytest
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from remixer_t5x.checkpoints import checkpoint_manager, durable_folders, saved_params
from remixer_t5x.data.prefetch import DataPosition
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import model_dir

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')
STATE = {'w': jnp.arange(512.0), 'step': jnp.int32(4)}


@pytest.fixture(scope='module')
def written(tmp_path_factory):
    """Returns a checkpoint, and the calls of fsync and rename in the order in which they wrote it."""
    calls = []
    folder = model_dir.create_model_dir(tmp_path_factory.mktemp('durable') / 'run')
    with pytest.MonkeyPatch.context() as patch:
        sync, rename = os.fsync, os.replace

        def fsync(descriptor):
            calls.append(('sync', os.readlink(f'/proc/self/fd/{descriptor}')))
            sync(descriptor)

        def record_rename(old, new):
            calls.append(('rename', str(old), str(new)))
            rename(old, new)

        patch.setattr(durable_folders.os, 'fsync', fsync)
        patch.setattr(durable_folders.os, 'replace', record_rename)
        checkpoints = checkpoint_manager.RunCheckpoints(folder)
        checkpoints.save(4, STATE, DataPosition(), {'window': {}})
        checkpoints.close()
    return folder / 'checkpoints' / '4', calls


def test_files_are_synced_before_the_rename_and_parents_after_it(written):
    folder, calls = written
    (commit,) = [i for i, call in enumerate(calls) if call[0] == 'rename' and call[2] == str(folder)]
    temporary = calls[commit][1]
    synced = {call[1] for call in calls[:commit]}
    contents = [path for path in pathlib.Path(folder).rglob('*')]
    assert len(contents) > 10 and folder / durable_folders.FILE_LIST in contents
    for path in [folder, *contents]:
        assert str(path).replace(str(folder), temporary) in synced, path
    assert [call[1] for call in calls[commit + 1 :]] == [str(parent) for parent in list(folder.parents)[:3]]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_file_is_reported(written, tmp_path, data):
    durable_folders.verify_file_checksums(written[0])
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
    with pytest.raises(durable_folders.DamagedCheckpointError) as raised:
        durable_folders.verify_file_checksums(copy)
    assert '\n' not in str(raised.value)
    if path.name != durable_folders.FILE_LIST:
        assert path.relative_to(copy).as_posix() in str(raised.value)


def test_a_checkpoint_with_nan_is_rejected(tmp_path):
    checkpoints = checkpoint_manager.RunCheckpoints(model_dir.create_model_dir(tmp_path / 'run'))
    bad = {**STATE, 'w': STATE['w'].at[7].set(jnp.nan)}
    checkpoints.save(1, bad, DataPosition(), {'window': {}})
    checkpoints.wait_until_finished()
    with pytest.raises(durable_folders.DamagedCheckpointError, match='contains NaN or infinity'):
        checkpoints.restore(1, bad)
    checkpoints.close()


def test_a_failed_background_write_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    """With keep=1, the previous checkpoint is only removed once the new one is committed."""
    checkpoints = checkpoint_manager.RunCheckpoints(model_dir.create_model_dir(tmp_path / 'run'), keep=1)
    checkpoints.save(1, STATE, DataPosition(), {'window': {}})
    checkpoints.wait_until_finished()

    def fail(written, final):
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(durable_folders, 'commit_checkpoint', fail)
        checkpoints.save(2, STATE, DataPosition(), {'window': {}})
        with pytest.raises(checkpoint_manager.CheckpointSaveError, match='no space left on the disk'):
            checkpoints.save(3, STATE, DataPosition(), {'window': {}})
    assert checkpoints.latest_step() == 1
    durable_folders.verify_file_checksums(checkpoints.folder / '1')
    checkpoints.reopen()
    checkpoints.save(4, STATE, DataPosition(), {'window': {}})
    checkpoints.close()
    # The previous checkpoint and the files of the failed write are removed.
    assert [path.name for path in checkpoints.folder.iterdir()] == ['4']


def test_a_damaged_array_description_is_reported_as_damage(written, tmp_path):
    """And not as a malicious checkpoint."""
    folder = epath.Path(tmp_path / 'copy')
    shutil.copytree(written[0], folder)
    (path,) = pathlib.Path(folder).glob('state/manifest.ocdbt')
    path.write_bytes(b'x' + path.read_bytes()[1:])
    with pytest.raises(durable_folders.DamagedCheckpointError, match='is damaged'):
        saved_params.verify_checkpoint_files(folder)


def test_a_file_list_with_files_outside_is_rejected(written, tmp_path):
    folder = tmp_path / 'copy'
    shutil.copytree(written[0], folder)
    listed = json.loads((folder / durable_folders.FILE_LIST).read_text())
    (folder / durable_folders.FILE_LIST).write_text(json.dumps({**listed, '../../other': [1, 'a']}))
    with pytest.raises(UserError, match='outside') as error:
        saved_params.verify_checkpoint_files(epath.Path(folder))
    assert not isinstance(error.value, durable_folders.DamagedCheckpointError)
