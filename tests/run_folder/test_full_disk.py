"""On a full disk, the writers of a run raise one-line errors, and leave no dead threads or partial lines."""

import contextlib
import json
import threading

import numpy as np
import pytest
from etils import epath

from remixer_t5x.cli import train as train_command
from remixer_t5x.evaluate import checkpoint_evaluation, checkpoint_ranking
from remixer_t5x.evaluate.task_evaluation import TaskReport
from remixer_t5x.interop import safetensors_files
from remixer_t5x.run_folder import metrics, model_dir
from remixer_t5x.train import progress, run_log, settings
from remixer_t5x.train.settings import TrainResult
from tests.run_folder import full_disks
from tests.support.error_lines import error_message

LOSS = {'loss': 2.0}
REPORT = TaskReport('cogs', 'gen', {'f1': 2.0}, [{'prediction': 'a'}], 1.0)


def _lock(folder):
    with model_dir.lock_model_dir(epath.Path(folder)):
        pass


def _loss_png(folder):
    (folder / model_dir.METRICS).exists() or pytest.fail('created before the disk was full')
    train_command._plot_loss(TrainResult(1, None, LOSS, {}, str(folder), ''), settings.STOP)


def _results(folder):
    with contextlib.closing(checkpoint_evaluation.ReportWriter(str(folder))) as writer:
        writer.write(REPORT, 1, epath.Path(folder))


def _best(folder):
    checkpoint_ranking.BestCheckpoints(epath.Path(folder), {}).save_if_best(REPORT, 1, {'a': np.ones(1000, np.float32)})


WRITERS = {
    'metrics': lambda folder: metrics.JsonlWriter(epath.Path(folder) / 'x', 0).write('train', 1, LOSS, {}),
    'lock': _lock,
    'loss.png': _loss_png,
    'best': _best,
    'configuration': lambda folder: model_dir.write_config(epath.Path(folder), 'A = 1\n'),
    'marker': lambda folder: model_dir.create_model_dir(folder),
    'predictions': lambda folder: checkpoint_evaluation.write_jsonl(
        epath.Path(folder) / 'x.jsonl', [{'prediction': 'a'}]
    ),
    'results': _results,
    'safetensors': lambda folder: safetensors_files.write_params(
        str(folder / 'x'), {'a': np.ones(9, np.float32)}, 1, {}
    ),
}


@pytest.fixture
def folder(tmp_path):
    record = {'kind': 'train', 'step': 1, **LOSS, 'timing': {}}
    (tmp_path / model_dir.METRICS).write_text(json.dumps(record) + '\n')
    (tmp_path / model_dir.MARKER_FILE).write_text('{}')
    return tmp_path


@pytest.mark.parametrize('name', WRITERS)
def test_every_writer_raises_a_one_line_error(folder, name):
    threads = threading.active_count()
    with full_disks.full():
        assert 'cannot be' in error_message(lambda: WRITERS[name](folder))
    assert threading.active_count() <= threads + (name == 'best') * 50


def test_lines_are_written_completely_or_not_at_all(tmp_path):
    path = epath.Path(tmp_path / 'metrics.jsonl')
    writer = metrics.JsonlWriter(path, 0)
    writer.write('train', 1, LOSS, {})
    size = path.stat().length
    with full_disks.full(size + 10):
        for step in (2, 3):
            error_message(lambda: writer.write('train', step, LOSS, {}))  # noqa: B023
            assert path.stat().length == size, 'a partial line was written'
    writer.write('train', 4, LOSS, {})
    assert [record['step'] for record in metrics.read_records(path)] == [1, 2, 3, 4]


@pytest.fixture
def log(folder):
    """Returns a function that opens the log of a run with a value of ON_SAVE_FAILURE."""
    logs = []

    def open_log(on_save_failure):
        continues = on_save_failure == settings.CONTINUE
        logs.append(
            run_log.RunLog(
                epath.Path(folder),
                step=1,
                last_step=10,
                cost=progress.StepCost(),
                tolerates_failures=continues,
                show=True,
            )
        )
        return logs[0]

    yield open_log
    for run in logs:
        run.close()


def test_a_run_stops_if_its_log_cannot_be_written(log, capsys):
    run = log(settings.STOP)
    with full_disks.full():
        assert 'metrics.jsonl cannot be written' in error_message(lambda: run.log_evaluation('eval', 2, LOSS, 1.0))
        run.close()
    output = capsys.readouterr()
    # The command prints the error, not the log.
    assert 'metrics.jsonl' not in output.out + output.err


def test_continue_warns_once_and_writes_the_lines_later(log, folder, capsys):
    run = log(settings.CONTINUE)
    with full_disks.full():
        for step in (2, 3, 4):
            run.log_evaluation('eval', step, LOSS, 1.0)
    assert capsys.readouterr().out.count('warning: ') == 1
    run.log_evaluation('eval', 5, LOSS, 1.0)
    assert [record['step'] for record in metrics.read_records(epath.Path(folder / 'metrics.jsonl'))] == [1, 2, 3, 4, 5]
