"""A trained model in another home folder, without its training data."""

import csv
import json
import os
import pathlib
import shutil

import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from tests.support import command_folder

SIZES = """
EMBED_DIM = 16
MLP_DIM = 24
NUM_HEADS = 2
HEAD_DIM = 8
NUM_ENCODER_LAYERS = 1
NUM_DECODER_LAYERS = 1
DTYPE = 'float32'
BATCH_SIZE = 4
TRAIN_STEPS = 2
WARMUP_STEPS = 1
LOG_PERIOD = 1
EVAL_PERIOD = 2
CHECKPOINT_PERIOD = 2
"""
PAIRS = f"""
include 'experiments/finetune_pairs.gin'
{SIZES}
PAIRS = 'rows.csv'
INPUTS = 'is {{number}} even?'
TARGETS = 'answer'
TASK_FEATURE_LENGTHS = {{'inputs': 24, 'targets': 8}}
MODEL_DIR = 'run'
EVAL_BATCH_SIZE = 8
"""
TEXT = f"""
include 'experiments/own_text.gin'
include 'models/t5_1_1.gin'
{SIZES}
FILES = 'text/*.txt'
VOCAB_SIZE = 300
TASK_FEATURE_LENGTHS = {{'inputs': 24, 'targets': 16}}
MODEL_DIR = 'run'
"""
LENGTHS = {'inputs': 24, 'targets': 8}
COMMANDS = {'pairs': ('finetune', PAIRS), 'text': ('train', TEXT)}


def write_rows(name, numbers):
    with open(name, 'w', newline='') as file:
        writer = csv.writer(file)
        writer.writerow(['number', 'answer'])
        writer.writerows([n, 'odd' if n % 2 else 'even'] for n in numbers)


def predictions(path):
    return [json.loads(line)['prediction'] for line in pathlib.Path(path).read_text().splitlines()]


@pytest.fixture(scope='module', params=COMMANDS)
def copied_run(request, tmp_path_factory):
    """Trains in one home folder, and then enters another one that contains only a copy of MODEL_DIR."""
    command, config = COMMANDS[request.param]
    first, second = tmp_path_factory.mktemp('first'), tmp_path_factory.mktemp('second')
    with command_folder.working_directory(first):
        os.environ.update(HOME=str(first), REMIXER_T5X_CACHE=str(first / 'cache'))
        (first / 'config.gin').write_text(config)
        write_rows('rows.csv', range(60))
        (first / 'text').mkdir()
        text = [f'the number {n} is {"odd" if n % 2 else "even"}, not {n + 1}.\n\n' for n in range(800)]
        (first / 'text/a.txt').write_text(''.join(text))
        assert main([command, '--gin_file=config.gin']) == 0
        if command == 'finetune':
            write_rows(second / 'new.csv', range(70, 80))
            arguments = ['infer', '--checkpoint=run', f'--input={second}/new.csv', f'--output={second}/expected.jsonl']
            assert main(arguments) == 0
        shutil.copytree('run', second / 'model')
        os.chdir(second)
        # A thread of the run may still write to its cache, so the folder is renamed and not deleted.
        os.rename(first, f'{first}.gone')
        os.environ.update(HOME=str(second), REMIXER_T5X_CACHE=str(second / 'cache'))
        (second / 'lines.txt').write_text('the number 7\nis odd\n')
        yield request.param, second


@pytest.fixture
def kind(copied_run):
    yield copied_run[0]
    assert not (copied_run[1] / 'cache/vocabularies').exists(), 'a vocabulary was trained again'


def test_infer_and_eval_need_no_training_data(kind, copied_run, capsys):
    decoders = ([], ['--beams=2'], ['--embed']) if kind == 'pairs' else ([],)
    source = 'lines.txt' if kind == 'text' else 'new.csv'
    for number, flags in enumerate(decoders):
        name = f'answers{number}.{"npz" if "--embed" in flags else "jsonl"}'
        assert main(['infer', '--checkpoint=model', f'--input={source}', f'--output={name}', *flags]) == 0, flags
    assert 'error' not in capsys.readouterr().err
    if kind != 'text':
        assert predictions('answers0.jsonl') == predictions('expected.jsonl')
        rows = ['--gin.VALIDATION_PAIRS=new.csv', '--output=evaluated', '--gin.EVAL_EXAMPLES=4', '--sampling=0.5']
        assert main(['eval', '--checkpoint=model/checkpoints/2', *rows]) == 0
        # The training rows no longer exist.
        capsys.readouterr()
        assert main(['eval', '--checkpoint=model']) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert 'PAIRS' in error and 'rows.csv' in error and 'existing path' in error


def test_loading_conversion_and_export_need_no_training_data(kind, copied_run, capsys):
    texts, answers = ['is 3 even?', 'the number 8'], ['odd', 'even']
    expected = remixer_t5x.load('model').score(texts, answers)
    capsys.readouterr()
    if kind == 'pairs':
        assert main(['export', '--checkpoint=model', '--to=exported', '--functions=score']) == 0
        assert main(['convert', '--checkpoint=model', '--to_shared=shared']) == 0
        assert main(['convert', '--from_hf=shared', '--to=back']) == 0
        os.rename('back', 'moved')
    else:
        assert main(['convert', '--checkpoint=model', '--to_safetensors=file.safetensors']) == 0
        assert main(['convert', '--checkpoint=model', '--to_t5x=t5x']) == 0
        assert main(['convert', '--checkpoint=model', '--to_hf=hf']) == 0
    for folder in ('shared', 'moved') if kind == 'pairs' else ('hf',):
        np.testing.assert_allclose(
            remixer_t5x.load(folder, lengths=LENGTHS).score(texts, answers), expected, rtol=1e-5, err_msg=folder
        )
    (copied_run[1] / 'pairs.jsonl').write_text(json.dumps({'inputs': texts[0], 'targets': answers[0]}) + '\n')
    capsys.readouterr()
    assert main(['score', 'model', 'pairs.jsonl']) == 0
    assert json.loads(capsys.readouterr().out)['score'] == pytest.approx(float(expected[0]), rel=1e-5)


def test_a_checkpoint_that_does_not_exist_is_named_with_the_nearest(kind, capsys):
    assert main(['infer', '--input=new.csv', '--beams=2', '--checkpoint=modl']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert 'modl' in error and 'model' in error.replace('modl', '') and 'defined' not in error
