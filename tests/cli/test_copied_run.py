"""A model trained on text in another home folder, without its training data."""

import json
import os
import shutil

import numpy as np
import pytest

import remixer_t5x
from remixer_t5x.cli.main import main
from tests.support import command_folder

CONFIG = """
include 'experiments/own_text.gin'
include 'models/t5_1_1.gin'
FILES = 'text/*.txt'
VOCAB_SIZE = 300
TASK_FEATURE_LENGTHS = {'inputs': 24, 'targets': 16}
MODEL_DIR = 'run'
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


@pytest.fixture
def copied_run(tmp_path_factory):
    """Trains in one home folder, and then enters another one that contains only a copy of MODEL_DIR, `model`."""
    first, second = tmp_path_factory.mktemp('first'), tmp_path_factory.mktemp('second')
    with command_folder.working_directory(first):
        os.environ.update(HOME=str(first), REMIXER_T5X_CACHE=str(first / 'cache'))
        (first / 'config.gin').write_text(CONFIG)
        (first / 'text').mkdir()
        text = [f'the number {n} is {"odd" if n % 2 else "even"}, not {n + 1}.\n\n' for n in range(800)]
        (first / 'text/a.txt').write_text(''.join(text))
        assert main(['train', '--gin_file=config.gin']) == 0
        shutil.copytree('run', second / 'model')
        os.chdir(second)
        # A thread of the run may still write to its cache, so the folder is renamed and not deleted.
        os.rename(first, f'{first}.gone')
        os.environ.update(HOME=str(second), REMIXER_T5X_CACHE=str(second / 'cache'))
        yield second


def test_inference_and_conversion_need_no_training_data(copied_run, capsys):
    (copied_run / 'lines.txt').write_text('the number 7\nis odd\n')
    assert main(['infer', '--checkpoint=model', '--input=lines.txt', '--output=answers.jsonl']) == 0
    texts, answers = ['is 3 even?', 'the number 8'], ['odd', 'even']
    expected = remixer_t5x.load('model').score(texts, answers)
    assert main(['convert', '--checkpoint=model', '--to_safetensors=file.safetensors']) == 0
    assert main(['convert', '--checkpoint=model', '--to_t5x=t5x']) == 0
    assert main(['convert', '--checkpoint=model', '--to_hf=hf']) == 0
    loaded = remixer_t5x.load('hf', lengths={'inputs': 24, 'targets': 8})
    np.testing.assert_allclose(loaded.score(texts, answers), expected, rtol=1e-5)
    (copied_run / 'pairs.jsonl').write_text(json.dumps({'inputs': texts[0], 'targets': answers[0]}) + '\n')
    assert 'error' not in capsys.readouterr().err
    assert main(['score', 'model', 'pairs.jsonl']) == 0
    assert json.loads(capsys.readouterr().out)['score'] == pytest.approx(float(expected[0]), rel=1e-5)
    assert not (copied_run / 'cache/vocabularies').exists(), 'the vocabulary was trained again'
    assert main(['infer', '--input=lines.txt', '--beams=2', '--checkpoint=modl']) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert 'modl' in error and 'model' in error.replace('modl', '') and 'defined' not in error
