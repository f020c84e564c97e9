"""Array descriptions in untrusted checkpoints: those that would abort the process are refused."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from etils import epath

from remixer_t5x.checkpoints import checkpoint_paths, durable_folders, saved_params, untrusted_checkpoints
from remixer_t5x.interop import converted_checkpoint
from tests.support.error_lines import error_message

PARAMS = {'scale': np.arange(6, dtype=np.float32).reshape(2, 3), 'scalar': np.float32(3)}
# TensorStore aborted the process when it opened or read such an array.
HOSTILE = {
    'terabytes': {'shape': [2**38], 'chunks': [2**38]},
    'a size beyond floating-point numbers': {'shape': [2**61] * 20, 'chunks': [1] * 20},
    'raw elements of 2 GB': {'dtype': '|V2000000000', 'fill_value': None},
    'structures': {'dtype': [['a', '<f4', [8_589_934_592]]], 'fill_value': None},
    'objects': {'dtype': '|O', 'fill_value': None},
}


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    folder = converted_checkpoint.create_model_dir(tmp_path_factory.mktemp('saved') / 'run')
    return converted_checkpoint.write_checkpoint(
        folder, PARAMS, 7, converted_checkpoint.build_checkpoint_record('v', '', 'a test')
    )


@pytest.fixture
def change(saved, tmp_path):
    """Returns a function that changes the description of an array in a copy of the checkpoint, and returns the copy."""

    def change_copy(changes):
        copy = epath.Path(tmp_path / 'checkpoints' / '7')
        shutil.copytree(saved, copy)
        # An attacker would adapt the file list.
        (copy / durable_folders.FILE_LIST).unlink()
        store = ts.KvStore.open({'driver': 'ocdbt', 'base': f'file://{copy}/state/'}).result()
        [key] = [key for key in store.list().result() if key.endswith(b'scale/.zarray')]
        store.write(key, json.dumps({**json.loads(store[key]), **changes})).result()
        return copy

    return change_copy


@pytest.mark.parametrize('kind', HOSTILE)
def test_a_description_that_would_abort_the_process_is_rejected(change, kind):
    """`convert` calls the first function; `infer`, `eval` and INITIAL_CHECKPOINT_PATH call the second."""
    folder = change(HOSTILE[kind])
    error = error_message(converted_checkpoint.read_checkpoint, str(folder))
    assert 'but its files contain only' in error or 'does not describe a numeric array' in error
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), np.float32), PARAMS)
    assert error_message(saved_params.restore_params, str(folder), abstract) == error


def test_a_checkpoint_with_valid_descriptions_is_read(saved, change):
    for folder in (saved, change({})):
        params, _, step = converted_checkpoint.read_checkpoint(str(folder))
        assert step == 7
        np.testing.assert_array_equal(params['scale'], PARAMS['scale'])
        assert params['scalar'] == 3 and np.ndim(params['scalar']) == 0


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'bool'])
@pytest.mark.parametrize('driver', ['zarr', 'zarr3'])
def test_numeric_dtypes_of_tensorstore_are_accepted(tmp_path, dtype, driver):
    spec = {'driver': driver, 'kvstore': {'driver': 'file', 'path': str(tmp_path / 'a')}, 'dtype': dtype}
    dtype = ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype
    ts.open({**spec, 'metadata': {'shape': [3]}}, create=True).result().write(np.ones(3, dtype)).result()
    untrusted_checkpoints.check_untrusted_checkpoint(tmp_path)


def test_arrays_of_zeros_may_be_larger_than_their_files(tmp_path):
    """Chunks that only contain the fill value are not written, as in a state before its first step."""
    metadata = {'zarr_format': 2, 'shape': [2**27], 'chunks': [2**27], 'dtype': '<f4'}
    (tmp_path / '.zarray').write_text(json.dumps(metadata))
    untrusted_checkpoints.check_untrusted_checkpoint(tmp_path)
    (tmp_path / '.zarray').write_text(json.dumps({**metadata, 'shape': [2**29], 'chunks': [2**27]}))
    assert '2.0 GiB of arrays' in error_message(untrusted_checkpoints.check_untrusted_checkpoint, tmp_path)
    with (tmp_path / '0').open('wb') as file:
        file.truncate(2**25)
    untrusted_checkpoints.check_untrusted_checkpoint(tmp_path)


@pytest.mark.parametrize('name', ['²', '007', '1' + '0' * 30])
def test_a_folder_with_a_noncanonical_number_is_not_a_step(saved, tmp_path, name):
    folder = epath.Path(tmp_path / 'run')
    shutil.copytree(saved.parent.parent, folder)
    (folder / 'checkpoints' / name / 'state').mkdir(parents=True)
    assert checkpoint_paths.list_steps(folder / 'checkpoints') == [7]
    assert converted_checkpoint.read_checkpoint(str(folder))[2] == 7


@pytest.mark.parametrize('record', ['[]', '[' * 100_000, ''])
def test_an_invalid_record_raises_an_error(change, record):
    folder = change({})
    (folder / 'run' / 'metadata').write_text(record)
    assert 'cannot be read' in error_message(converted_checkpoint.read_checkpoint, str(folder))
