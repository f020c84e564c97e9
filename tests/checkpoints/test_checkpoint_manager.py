"""Saving and restoring checkpoints, and errors of folders and checkpoints."""

import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from remixer_t5x.checkpoints import checkpoint_manager, compatibility, saved_params
from remixer_t5x.data.prefetch import DataPosition
from remixer_t5x.optim.train_state import TrainState
from remixer_t5x.run_folder import model_dir
from tests.support.error_lines import error_message

RUN = {'vocabulary': 'ab12 of 384 ids', 'batch_size': 8, 'feature_lengths': {'inputs': 16, 'targets': 12}}
pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')


def state_of(seed, embed=4):
    params = {'table': jax.random.normal(jax.random.key(seed), (6, embed)), 'scale': jnp.ones(embed)}
    # The state of `add_noise` contains a PRNG key.
    tx = optax.chain(optax.scale_by_adam(), optax.add_noise(0.1, 0.5, jax.random.key(seed)))
    return TrainState(jnp.int32(seed), params, tx.init(params), jnp.zeros(()))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_equal(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(as_numpy(a), as_numpy(b), strict=True), ours, theirs)


def as_numpy(leaf):
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.fixture
def folder(tmp_path):
    return model_dir.create_model_dir(tmp_path / 'run')


@pytest.fixture
def saved(folder):
    """Returns a MODEL_DIR with the last two of three saved steps."""
    checkpoints = checkpoint_manager.RunCheckpoints(folder, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(
            step, state_of(step), DataPosition(step, {0: 0, 1: 0}, {0: b'\0state\xff', 1: b''}), {**RUN, 'window': {}}
        )
    checkpoints.close()
    return folder


def test_a_restored_checkpoint_equals_the_saved_one(saved):
    checkpoints = checkpoint_manager.RunCheckpoints(saved, keep=2)
    assert checkpoints.list_complete_steps() == [2, 3] and checkpoints.latest_step() == 3
    state, position = checkpoints.restore(3, abstract(state_of(0)))
    assert_equal(state, state_of(3))
    assert position == DataPosition(3, {0: 0, 1: 0}, {0: b'\0state\xff', 1: b''})
    assert saved_params.read_record(saved / 'checkpoints' / '3')['vocabulary'] == RUN['vocabulary']
    checkpoints.close()


def test_donated_buffers_are_not_written(folder):
    """The next steps overwrite the buffers of the state while the checkpoint is written."""
    checkpoints = checkpoint_manager.RunCheckpoints(folder)
    state = TrainState(jnp.int32(0), {'w': jnp.ones((256, 1024))}, (), jnp.zeros(()))
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 7, s), donate_argnums=0)
    expected = jax.tree.map(np.array, state)
    checkpoints.save(1, state, DataPosition(), RUN)
    for _ in range(5):
        state = advance(state)
    checkpoints.wait_until_finished()
    assert_equal(jax.tree.map(np.asarray, checkpoints.restore(1, abstract(state))[0]), expected)
    checkpoints.close()


def test_an_interrupted_write_or_removal_is_not_a_checkpoint(saved):
    steps = saved / 'checkpoints'
    shutil.copytree(steps / '3', steps / '4.orbax-checkpoint-tmp')
    os.remove(steps / '4.orbax-checkpoint-tmp' / '_CHECKPOINT_METADATA')
    # An interrupted removal.
    (steps / '5').mkdir()
    checkpoints = checkpoint_manager.RunCheckpoints(saved, keep=4)
    assert checkpoints.latest_step() == 3
    checkpoints.save(4, state_of(4), DataPosition(), RUN)
    checkpoints.wait_until_finished()
    checkpoints.close()
    assert sorted(p.name for p in steps.iterdir()) == ['2', '3', '4', '5'] and checkpoints.latest_step() == 4


def test_a_damaged_description_without_file_list_raises_an_error(saved):
    step = pathlib.Path(saved / 'checkpoints' / '3')
    (step / 'files.json').unlink()
    (step / 'state' / '_METADATA').write_text('[]')
    text = error_message(lambda: saved_params.restore_params(str(saved), abstract(state_of(0)).params))
    assert 'damaged' in text and 'copy the checkpoint again, or use another' in text


def test_resuming_with_other_settings_raises_an_error():
    compatibility.check_record_compatible(RUN, RUN)
    assert 'vocabulary ab12 of 384 ids' in error_message(
        lambda: compatibility.check_record_compatible(RUN, {**RUN, 'vocabulary': 'other'})
    )
    settings = {'BATCH_SIZE', 'TASK_FEATURE_LENGTHS', 'pack', 'LENGTH_BUCKETS', 'MIXTURE_OR_TASK_NAME', 'SEED'}
    assert {*compatibility.FIXED_SETTINGS.values()} == settings | {'TRAIN_SPLIT'}
    # Checkpoints of version 0.1.0 do not contain the split.
    compatibility.check_record_compatible(RUN, {**RUN, 'split': 'train'})
    for name in ('vocabulary', 'data'):
        other = {**RUN, name: {'pairs': {}}, 'config': "INPUTS = 'b'\n"}
        text = error_message(
            lambda other=other: compatibility.check_record_compatible({**RUN, 'config': "INPUTS = 'a'\n"}, other)
        )
        assert "(changed: INPUTS 'a' -> 'b')" in text
    saved = {**RUN, 'split': 12}
    for key, setting in compatibility.FIXED_SETTINGS.items():
        text = error_message(lambda key=key: compatibility.check_record_compatible(saved, {**saved, key: 16}))
        assert f'{setting} = {saved.get(key)}' in text and '16' in text and 'INITIAL_CHECKPOINT_PATH' in text
        assert 'keeps the parameters and resets the optimizer, the step and the data position' in text


def test_parameters_are_restored_from_a_run_or_a_checkpoint(saved):
    for subfolder, step in (('', 3), ('checkpoints', 3), ('checkpoints/2', 2)):
        params = saved_params.restore_params(str(saved / subfolder), abstract(state_of(0)).params, RUN['vocabulary'])
        assert_equal(params, state_of(step).params)


def test_a_checkpoint_of_another_model_or_vocabulary_raises_an_error(saved):
    checkpoints, other = checkpoint_manager.RunCheckpoints(saved), abstract(state_of(0, embed=5))
    text = error_message(checkpoints.restore, 3, other, 'EMBED 4 -> 5')
    assert 'has shape' in text and '(4,), expected (5,)' in text
    assert 'EMBED 4 -> 5' in text and 'MODEL_DIR' in text and 'INITIAL_CHECKPOINT_PATH' not in text
    # The parameters of a run with another optimizer can be kept.
    text = error_message(checkpoints.restore, 3, abstract(state_of(0).replace(opt_state={'z': jnp.zeros(2)})))
    assert 'opt_state/' in text and 'INITIAL_CHECKPOINT_PATH' in text
    checkpoints.close()
    assert '(4,), expected (5,)' in error_message(saved_params.restore_params, str(saved), other.params)
    params = abstract(state_of(0)).params
    assert 'trained with vocabulary' in error_message(saved_params.restore_params, str(saved), params, 'other')


def test_model_dir_must_be_a_new_folder_or_that_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert model_dir.create_model_dir('runs/first') == model_dir.create_model_dir(tmp_path / 'runs' / 'first')
    foreign = tmp_path / 'foreign'
    foreign.mkdir()
    (foreign / 'thesis.tex').write_text('')
    assert f'without {model_dir.MARKER_FILE}' in error_message(lambda: model_dir.create_model_dir(foreign))
    assert 'must be a folder, got the file' in error_message(lambda: model_dir.create_model_dir(foreign / 'thesis.tex'))
    assert 'cannot be written' in error_message(lambda: model_dir.create_model_dir(foreign / 'thesis.tex' / 'run'))
    assert "MODEL_DIR must be a folder for this run, got ''" in error_message(lambda: model_dir.create_model_dir(''))
    assert [p.name for p in foreign.iterdir()] == ['thesis.tex']


def test_a_name_with_pattern_characters_is_rejected(saved, tmp_path):
    """Orbax would write a checkpoint there and not find it again."""
    path = tmp_path / 'run[1]'
    assert 'as a pattern' in error_message(lambda: model_dir.create_model_dir(path))
    assert not path.exists()
    shutil.copytree(saved, path)
    assert 'as a pattern' in error_message(lambda: saved_params.open_checkpoint(str(path)))
