"""`Sweep.run` with parallel cells: a failed cell is listed with its error, and a signal stops all of them."""

import json
import signal
import sys

import pytest

from remixer_t5x.config import loading
from remixer_t5x.extras.reports import comparison, sweep
from remixer_t5x.run_folder import model_dir, object_store
from tests.support.error_lines import error_message

# Seeds 0 and 1 wait for each other; seed 0 then fails if the last argument is `fails`, or signals the sweep.
PROGRAM = """
import os, pathlib, signal, sys, time
folder, action = pathlib.Path(sys.argv[1]), sys.argv[2]
def save(*_):
    (folder / 'saved').touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
folder.mkdir()
while not all((folder.parent / f'seed_{seed}').is_dir() for seed in (0, 1)):
    time.sleep(0.01)
if folder.name == 'seed_0' and action == 'fails':
    sys.exit('error: boom')
if action == 'stops' and folder.name == 'seed_0':
    os.kill(os.getppid(), signal.SIGTERM)
if action == 'stops' or (action == 'disk full' and folder.name == 'seed_1'):
    time.sleep(60)
"""


@pytest.mark.parametrize('action', ['fails', 'stops'])
def test_parallel_cells_fail_separately_and_stop_together(action, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep, '_PROGRESS_PERIOD', 0.0)
    monkeypatch.setattr(sweep, 'PROGRAM', (sys.executable, '-c', PROGRAM))
    folders = [tmp_path / f'seed_{seed}' for seed in range(3)]
    cells = [sweep.SweepCell('t5', (), seed, path, (str(path), action)) for seed, path in enumerate(folders)]
    runner = sweep.Sweep(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    if action == 'stops':
        with pytest.raises(sweep.SweepStopped, match=str(128 + signal.SIGTERM)):
            runner.run(cells, parallel=2)
        assert not runner.failed and not folders[2].exists()
        assert all((folder / 'saved').exists() for folder in folders[:2])
    else:
        runner.run(cells, parallel=2)
        assert runner.failed == {cells[0]: 'error: boom'}
        assert [list(cell.command) in sweep.Sweep(tmp_path)._finished for cell in cells] == [False, True, True]
    assert signal.getsignal(signal.SIGTERM) == handler
    assert 'no output' not in capsys.readouterr().err


def test_the_other_runs_are_stopped_if_the_sweep_cannot_record_a_finished_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, 'PROGRAM', (sys.executable, '-c', PROGRAM))
    folders = [tmp_path / f'seed_{seed}' for seed in range(2)]
    cells = [sweep.SweepCell('t5', (), seed, path, (str(path), 'disk full')) for seed, path in enumerate(folders)]
    runner = sweep.Sweep(tmp_path)
    (tmp_path / sweep.FINISHED_FILE).mkdir()
    with pytest.raises(object_store.WriteError, match=sweep.FINISHED_FILE):
        runner.run(cells, parallel=2)
    assert (folders[1] / 'saved').exists()


def test_runs_with_results_keep_their_settings(tmp_path, monkeypatch):
    folder = tmp_path / 'seed_1'
    folder.mkdir()
    (folder / model_dir.CONFIG).write_text('BATCH_SIZE = 1')
    monkeypatch.setattr(loading, 'get_config_text', lambda: 'BATCH_SIZE = 2')
    # A run without checkpoints that has not finished starts again.
    sweep.Sweep(tmp_path).check_existing_run(folder)
    (tmp_path / sweep.FINISHED_FILE).write_text(json.dumps([f'--gin.MODEL_DIR={folder}']) + '\n')
    assert 'BATCH_SIZE 1 -> 2' in error_message(sweep.Sweep(tmp_path).check_existing_run, folder)
    (folder / model_dir.CONFIG).write_text('BATCH_SIZE = 2\nTRAIN_STEPS = 2')
    assert '(TRAIN_STEPS 2 -> 0)' in error_message(sweep.Sweep(tmp_path).check_existing_run, folder)


def test_a_continued_run_that_was_stopped_is_not_finished(tmp_path, monkeypatch):
    cell = sweep.SweepCell('t5', (), 1, tmp_path / 'seed_1', (f'--gin.MODEL_DIR={tmp_path / "seed_1"}',))
    cell.folder.mkdir()
    # A killed process has left an incomplete line.
    (tmp_path / sweep.FINISHED_FILE).write_text(json.dumps(cell.command) + '\n["--gin')
    monkeypatch.setattr(sweep, '_describe_data_change', lambda folder: None)
    monkeypatch.setattr(loading, 'get_config_text', lambda: 'TRAIN_STEPS = 4')
    for status, steps in ((1, 2), (0, 4)):
        (cell.folder / model_dir.CONFIG).write_text(f'TRAIN_STEPS = {steps}')
        monkeypatch.setattr(sweep, 'PROGRAM', (sys.executable, '-c', f'raise SystemExit({status})'))
        runner = sweep.Sweep(tmp_path)
        runner.check_existing_run(cell.folder)
        runner.run([cell])
        assert (list(cell.command) in sweep.Sweep(tmp_path)._finished) == (status == 0)


def test_a_file_that_cannot_be_written_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, 'PROGRAM', (sys.executable, '-c', ''))
    (tmp_path / 'file').touch()
    runner = sweep.Sweep(tmp_path)
    (tmp_path / sweep.FINISHED_FILE).mkdir()
    (tmp_path / 't5/seed_1.log').mkdir(parents=True)
    for folder, message in (
        ('file/seed_0', 'file cannot'),
        ('t5/seed_0', f'{sweep.FINISHED_FILE} cannot'),
        ('t5/seed_1', 't5 cannot'),
    ):
        with pytest.raises(object_store.WriteError, match=f'{message} be written'):
            runner.run([sweep.SweepCell('t5', (), 0, tmp_path / folder, ())])
    with pytest.raises(object_store.WriteError, match=f'{tmp_path} cannot be written'):
        comparison.write_csv({}, {}, {}, tmp_path)


def test_the_error_of_a_failed_run_is_not_that_of_an_earlier_attempt(tmp_path, monkeypatch):
    program = "import os, sys; sys.argv[1] == 'killed' and os.kill(os.getpid(), 9); sys.exit('error: boom')"
    monkeypatch.setattr(sweep, 'PROGRAM', (sys.executable, '-c', program))
    for action, error in (('fails', 'error: boom'), ('killed', 'no output')):
        runner, cell = sweep.Sweep(tmp_path), sweep.SweepCell('t5', (), 0, tmp_path / 'seed_0', (action,))
        runner.run([cell])
        assert runner.failed == {cell: error}
