"""Finetuning, evaluation and inference with labelled rows in CSV files."""

import ast
import contextlib
import csv
import json
import os
import pathlib
import shlex
import shutil

import numpy as np
import pytest
from etils import epath

import remixer_t5x
from remixer_t5x.cli import infer, train
from remixer_t5x.cli.main import main
from remixer_t5x.config import loading
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import checkpoint_evaluation
from remixer_t5x.evaluate.task_evaluation import TaskReport
from remixer_t5x.extras.reports import sweep
from tests.support import command_folder, feed_forward, saved_run

TEMPLATE = 'is {number} even?'
# Not the markup of rich, which prints the table of metrics.
BIG = '[/big]'
CONFIG = """
include 'experiments/finetune_pairs.gin'

PAIRS = 'rows.csv'
INPUTS = 'is {number} even?'
TARGETS = 'answer'
EVAL_PAIRS = {'small': 'small.csv', 'large': 'large.csv'}
METRICS = ['accuracy', 'best_constant_prediction']
METRICS_BY = 'type'
COLUMNS = ['number']
EMBED_DIM = 8
MLP_DIM = 8
NUM_ENCODER_LAYERS = 1
NUM_DECODER_LAYERS = 1
TASK_FEATURE_LENGTHS = {'inputs': 24, 'targets': 8}
BATCH_SIZE = 4
EVAL_BATCH_SIZE = 8
TRAIN_STEPS = 2
WARMUP_STEPS = 1
LOG_PERIOD = 1
EVAL_PERIOD = 2
CHECKPOINT_PERIOD = 2
"""
CONFIG += ''.join(f'{name} = {value}\n' for name, value in feed_forward.SETTINGS.items())


def write_rows(name, numbers):
    with open(name, 'w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(['number', 'answer', 'type'])
        writer.writerows([n, 'odd' if n % 3 else 'even', BIG if n > 21 else 'little'] for n in numbers)


def read_records(path):
    return [json.loads(line) for line in pathlib.Path(path).read_text().splitlines()]


def run(*argv):
    return main([argv[0], '--gin_file=pairs.gin', *argv[1:]])


@pytest.fixture(scope='module')
def current_folder(tmp_path_factory):
    """Yields the current folder with a finetuned `run`, its evaluation, and answers.jsonl for the rows of large.csv.

    Only finetune reads pairs.gin; the other commands read the config.gin of the run.
    """
    with command_folder.working_directory(tmp_path_factory.mktemp('pairs')) as folder:
        (folder / 'pairs.gin').write_text(CONFIG)
        write_rows('rows.csv', range(60))
        write_rows('small.csv', range(9))
        write_rows('large.csv', range(15, 27))
        with (folder / 'output.txt').open('w') as file, contextlib.redirect_stdout(file):
            assert run('finetune', '--gin.MODEL_DIR=run') == 0
        with (folder / 'errors.txt').open('w') as file, contextlib.redirect_stderr(file):
            assert main(['eval', '--checkpoint=run']) == 0
            assert main(['infer', '--checkpoint=run/checkpoints/2', '--input=large.csv', '--output=answers.jsonl']) == 0
        yield folder


def test_each_file_has_separate_metrics_and_a_best_checkpoint(current_folder):
    names = {'own_pairs', 'own_pairs_small', 'own_pairs_large'}
    records = read_records('run/metrics.jsonl')
    evaluations = {record['kind']: record for record in records if record['kind'].startswith('eval/')}
    assert all(f'held_out/{name}' in {record['kind'] for record in records} for name in names)
    average = evaluations.pop('eval/average')['average']
    assert set(evaluations) == {f'eval/{name}' for name in names}
    assert average == pytest.approx(np.mean([record['accuracy'] for record in evaluations.values()]))
    assert 'average over 3 tasks, each at its best step: ' in (current_folder / 'output.txt').read_text()
    large = evaluations['eval/own_pairs_large']
    constant = 'best_constant_prediction'
    assert large[constant] == pytest.approx(100 * 8 / 12)
    assert f'{constant}/{BIG}' not in evaluations['eval/own_pairs_small']
    assert {path.name for path in (current_folder / 'run/best').iterdir()} == names | {'average'}
    predictions = {path.name: read_records(path) for path in (current_folder / 'run/eval/predictions').iterdir()}
    assert set(predictions) == {f'{name}-validation-2.jsonl' for name in names}
    rows = predictions['own_pairs_large-validation-2.jsonl']
    assert [row['input'] for row in rows] == [TEMPLATE.format(number=n) for n in range(15, 27)]
    assert rows[0]['example'] == {'number': '15', 'type': 'little'}
    # One of the five rows from 22 on is even, and three of the seven rows below.
    for group, best in ((BIG, 4 / 5), ('little', 4 / 7)):
        right = [row['prediction'] == row['target'] for row in rows if row['example']['type'] == group]
        assert large[f'accuracy/{group}'] == pytest.approx(100 * sum(right) / len(right))
        assert large[f'{constant}/{group}'] == pytest.approx(100 * best)


@pytest.mark.usefixtures('current_folder')
def test_infer_reads_rows_like_finetuning_even_without_a_gin_file():
    expected = read_records('run/eval/predictions/own_pairs_large-validation-2.jsonl')
    answers = read_records('answers.jsonl')
    assert [(row['input'], row['prediction']) for row in answers] == [(r['input'], r['prediction']) for r in expected]
    error = pathlib.Path('errors.txt').read_text()
    assert 'no --gin_file is given: reading' in error and 'warning' not in error


def test_results_on_other_rows_have_separate_names(current_folder, capsys):
    write_rows('other.csv', range(100, 108))
    command = ('eval', '--checkpoint=run', '--task=own_pairs', '--output=separate')
    assert run(*command, '--gin.VALIDATION_PAIRS=other.csv') == 0
    (record,) = read_records('separate/metrics.jsonl')
    assert record['kind'].startswith('validation/own_pairs@')
    assert record['kind'].partition('/')[2] in capsys.readouterr().out
    assert run(*command) == 0
    kinds = [record['kind'] for record in read_records('separate/metrics.jsonl')]
    assert kinds == [record['kind'], 'validation/own_pairs']
    files = {path.name: read_records(path) for path in (current_folder / 'separate/predictions').iterdir()}
    assert len(files) == 2 and len(files['own_pairs-validation-2.jsonl']) != 8
    # In a folder without results of the run, the first evaluation determines the examples.
    with contextlib.closing(checkpoint_evaluation.ReportWriter('unknown_run')) as writer:
        for digest in ('a' * 16, 'b' * 16):
            writer.write(TaskReport('cogs', 'test', {}, [], 0.0, digest, digest), 1, epath.Path('1'))
    kinds = [record['kind'] for record in read_records('unknown_run/metrics.jsonl')]
    assert kinds == ['test/cogs', 'test/cogs@bbbbbbbb']
    for digest, steps in (('b' * 16, {1}), ('c' * 16, set())):
        assert checkpoint_evaluation.read_evaluated_steps('unknown_run', {'test/cogs': digest}) == steps


def test_compare_does_not_reuse_a_run_that_was_evaluated_on_other_rows(current_folder, clean_gin):
    loading.load_gin_config(loading.ConfigSources(['pairs.gin'], [('MODEL_DIR', 'run')]), train.ROOT, partial=False)
    runs = sweep.Sweep(current_folder)
    runs.check_existing_run(current_folder / 'run')
    write_rows('small.csv', range(10))
    with pytest.raises(UserError, match='own_pairs_small has different files'):
        runs.check_existing_run(current_folder / 'run')
    write_rows('small.csv', range(9))


def test_predictions_are_scored_without_the_training_rows(current_folder, capsys):
    write_rows('held_out.csv', range(4))
    settings = "include 'pairs.gin'\nPAIRS = 'removed.csv'\nVALIDATION_PAIRS = 'held_out.csv'\nEVAL_PAIRS = None\n"
    (current_folder / 'held_out.gin').write_text(settings)
    (current_folder / 'odd.jsonl').write_text('{"prediction": "odd"}\n' * 4)
    command = ['eval', '--gin_file=held_out.gin', '--predictions=odd.jsonl']
    assert main(command) == 0
    assert 'accuracy                 50.00' in capsys.readouterr().out
    assert main([*command, '--split=train']) == 2
    assert 'removed.csv' in capsys.readouterr().err
    # Tasks that only evaluation reads.
    predictions = 'run/eval/predictions/own_pairs_large-validation-2.jsonl'
    assert run('eval', f'--predictions={predictions}', '--task=own_pairs_large') == 0
    assert 'own_pairs_large, validation, 12 predictions' in capsys.readouterr().out


def test_infer_rejects_lines_that_do_not_fill_in_the_template(current_folder, capsys):
    (current_folder / 'lines.txt').write_text('is 3 even?\n')
    assert run('infer', '--checkpoint=run', '--input=lines.txt') == 2
    error = capsys.readouterr().err
    assert 'must have rows with the column number, got lines of text' in error and error.count('\n') == 1
    assert run('infer', '--checkpoint=run', '--input=lines.txt', '--gin.INPUT_TEMPLATE=None') == 0
    assert '"input": "is 3 even?"' in capsys.readouterr().out


def test_infer_warns_if_the_template_differs_from_that_of_the_run(current_folder, capsys):
    assert run('infer', '--checkpoint=run', '--input=large.csv', '--gin.INPUTS=number') == 0
    lines = capsys.readouterr().err.splitlines()
    assert any(
        line.startswith('warning: ') and "was trained with INPUTS = 'is {number} even?'" in line
        and line.endswith("""pass --gin.INPUTS='"is {number} even?"'""") for line in lines
    )  # fmt: skip


def test_a_shell_reads_the_template_in_the_warning(tmp_path):
    run_folder = saved_run.write_run(tmp_path / 'run', steps=(1,))
    for template in ("what's {number}?", 'is "{number}" $even?', 'ist {number} gerade?\\n'):
        (run_folder / 'config.gin').write_text(f'INPUTS = {template!r}\n')
        warning = infer.find_template_mismatch(str(run_folder), None)
        _, _, value = shlex.split(warning.partition('; pass ')[2])[0].partition('=')
        assert ast.literal_eval(value) == template


@pytest.fixture
def copied_run(current_folder, tmp_path, monkeypatch):
    """Enters another home folder with a copy of the run, `model`, and of large.csv; the training rows are gone."""
    shutil.copy('large.csv', tmp_path / 'new.csv')
    shutil.copy('answers.jsonl', tmp_path / 'expected.jsonl')
    shutil.copytree('run', tmp_path / 'model')
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path / 'cache'))
    os.rename(current_folder, f'{current_folder}.gone')
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        yield tmp_path
    os.rename(f'{current_folder}.gone', current_folder)


def test_infer_and_eval_need_no_training_rows(copied_run, capsys):
    for name, flags in {'a.jsonl': [], 'c.npz': ['--embed']}.items():
        assert main(['infer', '--checkpoint=model', '--input=new.csv', f'--output={name}', *flags]) == 0, flags
    assert 'error' not in capsys.readouterr().err
    answers, expected = ([row['prediction'] for row in read_records(name)] for name in ('a.jsonl', 'expected.jsonl'))
    assert answers == expected
    rows = ['--gin.VALIDATION_PAIRS=new.csv', '--gin.EVAL_PAIRS=None', '--gin.EVAL_EXAMPLES=4']
    assert main(['eval', '--checkpoint=model/checkpoints/2', *rows, '--output=evaluated', '--sampling=0.5']) == 0
    expected = remixer_t5x.load('model').score('is 3 even?', 'odd')
    (copied_run / 'pairs.jsonl').write_text('{"inputs": "is 3 even?", "targets": "odd"}\n')
    capsys.readouterr()
    assert main(['score', 'model', 'pairs.jsonl']) == 0
    assert json.loads(capsys.readouterr().out)['score'] == pytest.approx(float(expected[0]), rel=1e-5)
    assert not (copied_run / 'cache/vocabularies').exists(), 'the vocabulary was trained again'
    assert main(['eval', '--checkpoint=model']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert 'PAIRS' in error and 'rows.csv' in error and 'existing path' in error
    assert main(['infer', '--input=new.csv', '--beams=2', '--checkpoint=modl']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert 'modl' in error and 'model' in error.replace('modl', '') and 'defined' not in error


def test_loading_sharing_and_export_need_no_training_rows(copied_run):
    texts, answers = ['is 3 even?', 'is 8 even?'], ['odd', 'even']
    expected = remixer_t5x.load('model').score(texts, answers)
    assert main(['export', '--checkpoint=model', '--to=exported', '--functions=score']) == 0
    for target in ('shared=shared', 'safetensors=file.safetensors'):
        assert main(['convert', '--checkpoint=model', f'--to_{target}']) == 0
    assert main(['convert', '--from_hf=shared', '--to=back']) == 0
    os.rename('back', 'moved')
    for folder in ('shared', 'moved'):
        np.testing.assert_allclose(remixer_t5x.load(folder).score(texts, answers), expected, rtol=1e-5)
