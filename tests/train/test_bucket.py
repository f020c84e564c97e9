"""Runs whose MODEL_DIR is in a bucket, with a local fake of Google Cloud Storage and real processes."""

import signal
import sys

import pytest

from remixer_t5x.checkpoints import checkpoint_paths
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import model_dir
from tests.support import paths
from tests.support.compare_runs import difference
from tests.support.error_lines import error_message, printed_error
from tests.support.fake_gcs import TRUNCATED, FakeGcs

RUN = {'train_steps': 30, 'log_period': 3, 'eval_period': 20, 'checkpoint_period': 10}
MODEL_DIR = 'gs://bucket/runs/first'
PREFIX = 'runs/first'


@pytest.fixture
def store(tmp_path):
    store = FakeGcs(tmp_path, 'bucket')
    yield store
    store.close()


@pytest.fixture(scope='module')
def uninterrupted(training, tmp_path_factory):
    folder = tmp_path_factory.mktemp('uninterrupted') / 'run'
    code, output = training.run(model_dir=str(folder), **RUN)
    assert code == 0, output
    return folder


@pytest.fixture
def local_store(store, monkeypatch):
    """The store, which the test process can access too."""
    for name, value in store.environment().items():
        monkeypatch.setenv(name, value)
    return store


def start(training, store, **options):
    return training.start(
        model_dir=MODEL_DIR, environment=paths.environment(**store.environment()), **{**RUN, **options}
    )


def train(training, store, **options):
    process = start(training, store, **options)
    return process.wait(), process.output()


def complete_steps(store):
    """Returns the steps that have Orbax's commit marker."""
    parts = [name.split('/') for name in store.names('bucket', f'{PREFIX}/checkpoints/')]
    return sorted(int(step) for *_, step, name in (p for p in parts if len(p) == 5) if name == 'commit_success.txt')


def test_a_run_killed_during_an_upload_ends_bit_identical(training, local_store, uninterrupted, tmp_path):
    state = f'{PREFIX}/checkpoints/20/state'
    # The upload of the arrays of step 20 never ends.
    local_store.delay(f'(POST|PUT) {state}/.*ocdbt')
    process = start(training, local_store)
    process.wait_until(
        lambda: local_store.names('bucket', state) and complete_steps(local_store) == [10], 'the upload of step 20'
    )
    assert process.kill() == -signal.SIGKILL
    local_store.clear_faults()
    checkpoints = model_dir.to_absolute_path(MODEL_DIR) / model_dir.CHECKPOINTS
    # Step 20 is not complete, although its folder exists.
    assert (checkpoints / '20' / 'state').exists() and checkpoint_paths.list_steps(checkpoints) == [10]
    with pytest.raises(UserError, match='20 does not contain a checkpoint'):
        checkpoint_paths.find_checkpoint(f'{checkpoints}/20')

    code, output = train(training, local_store)
    assert code == 0, output
    copy = local_store.copy('bucket', PREFIX, tmp_path / 'copy')
    assert difference(copy, uninterrupted, RUN['train_steps']) is None
    assert checkpoint_paths.list_steps(checkpoints) == [10, 20, 30]
    # A bucket contains the same files as a folder, except for the lock.
    names = {name.split('/')[2] for name in local_store.names('bucket', f'{PREFIX}/')} - {''}
    assert names == {path.name for path in uninterrupted.iterdir()} - {'run.lock'}


def test_failed_requests_are_retried(training, store, uninterrupted, tmp_path):
    """Errors, connections that are closed before or during the response, and slow responses."""
    for method in ('GET', 'POST', 'PUT', 'DELETE'):
        for status in (503, 500, 429):
            store.fail(f'{method} {PREFIX}/', times=1, status=status)
        for status in (None, TRUNCATED):
            store.fail(f'{method} {PREFIX}/checkpoints', times=1, status=status)
        store.delay(f'{method} {PREFIX}/checkpoints', times=1, seconds=2.0)
    code, output = train(training, store, keep=1)
    assert code == 0, output
    assert all(fault.times == 0 for fault in store._faults)
    assert complete_steps(store) == [30]
    assert difference(store.copy('bucket', PREFIX, tmp_path / 'copy'), uninterrupted, 30) is None


def test_a_failed_upload_keeps_the_previous_checkpoint(training, store, uninterrupted, tmp_path):
    store.fail(f'(POST|PUT) {PREFIX}/checkpoints/20/state/.*ocdbt', status=403)
    code, output = train(training, store)
    error = printed_error(output)
    assert code == 2 and 'the checkpoint of step 10 is kept' in error
    assert complete_steps(store) == [10]

    # With 'continue', the run continues and the next checkpoint is complete.
    code, output = train(training, store, recovery={'on_save_failure': 'continue'}, quiet=False)
    assert code == 0 and output.count('training continues (ON_SAVE_FAILURE)') == 1, output
    assert complete_steps(store) == [10, 30]
    assert difference(store.copy('bucket', PREFIX, tmp_path / 'copy'), uninterrupted, 30) is None


def test_bucket_errors_are_one_line(local_store, monkeypatch):
    def message(folder=MODEL_DIR):
        return error_message(model_dir.create_model_dir, folder)

    assert 'does not exist' in message('gs://other/run')
    # TensorStore would write the arrays of runs/#1 and runs/#2 into runs/.
    assert 'gs://bucket/runs/#1 must not contain #' in message('gs://bucket/runs/#1')
    assert 'gs://bucket/a/../b must not contain # or ..' in message('gs://bucket/a/../b')
    local_store.fail('GET /storage/v1/b/bucket$', status=403)
    assert 'gs://bucket cannot be used: GET http' in message()
    local_store.clear_faults()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'google.cloud.storage', None)
        assert "run pip install 'remixer-t5x[gcs]'" in message()
    # Reading requires the network but not the library.
    monkeypatch.setenv('https_proxy', 'http://127.0.0.1:9')
    with pytest.raises(UserError, match='gs://bucket/runs/first cannot be read: .*Could not connect'):
        checkpoint_paths.find_checkpoint(MODEL_DIR)
