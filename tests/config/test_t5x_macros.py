"""Every macro and flag of T5X's scripts is read or has advice; golden/make_t5x_macros.py lists them."""

import json
import pathlib
import re

import pytest

from remixer_t5x.cli.main import main
from remixer_t5x.config import gin_files, loading
from remixer_t5x.errors import UserError

THEIRS = json.loads((pathlib.Path(__file__).parents[1] / 'golden/t5x_macros.json').read_text())
MODEL = ['models/t5_1_1.gin', 'sizes/tiny.gin', 'hardware/cpu.gin', 'data/python_docs.gin']
TRAINING = [*MODEL, 'optimizers/adamw_rms.gin']
# The gin files of each command. The command itself reads MIXTURE_OR_TASK_MODULE.
COMMANDS = {
    'train': [*TRAINING, 'runs/pretrain.gin'],
    'finetune': [*TRAINING, 'runs/finetune.gin'],
    'eval': [*MODEL, 'runs/eval.gin'],
    'infer': [*MODEL, 'runs/infer.gin'],
}
# Macros of other commands that a command ignores; T5X's mixtures of experts set BATCH_SIZE for all commands.
IGNORED = {'eval': {'BATCH_SIZE'}, 'infer': {'BATCH_SIZE'}}


def list_unknown_macros(macros, command):
    """Returns the macros that the command neither reads nor has advice for."""
    texts = [text for file in COMMANDS[command] for text in gin_files.GinReader().read(file)]
    read = {name for text in texts for name in text.referenced_macros}
    return {*macros} - read - gin_files.T5X_NAMES['macros'].keys() - {loading.MODULE}


@pytest.mark.parametrize('command', COMMANDS)
def test_macros_of_t5x_scripts_are_read_or_have_advice(command):
    assert list_unknown_macros(THEIRS['macros'][command], command) == IGNORED.get(command, set())


def test_macros_of_t5x_examples_are_read_or_have_advice():
    assert not set.intersection(*(list_unknown_macros(THEIRS['macros']['any'], command) for command in COMMANDS))


def test_advice_names_existing_macros():
    known = {
        name
        for text in gin_files.read_shipped_files().values()
        for name in (*text.assigned_macros, *text.referenced_macros)
    }
    advice = ' '.join(text for table in gin_files.T5X_NAMES.values() for text in table.values())
    named = set(re.findall(r'\b[A-Z]{2,}(?:_[A-Z]+)+\b', advice))
    assert named - known == set()
    assert len(named) > 15


def test_finetune_rejects_the_absolute_train_steps_of_t5x(capsys):
    files = [*TRAINING, 'runs/finetune.gin']
    flags = [('MODEL_DIR', 'given'), ('INITIAL_CHECKPOINT_PATH', 'given'), ('TRAIN_STEPS', '1020000')]
    typed = [*(f'--gin_file={file}' for file in files), *(f'--gin.{name}={value}' for name, value in flags)]
    assert main(['finetune', *typed]) == 2
    error = capsys.readouterr().err
    assert '1020000' in error and 'TRAIN_STEPS_RELATIVE' in error
    (steps,) = loading.load_macro_values(
        loading.ConfigSources(files, [*flags[:2], ('TRAIN_STEPS_RELATIVE', '7')]), 'TRAIN_STEPS'
    )
    assert steps == 7


@pytest.mark.parametrize(
    ('name', 'advice'),
    [
        ('NUM_MODEL_PARTITIONS', 'NUM_MODEL_PARTITIONS is set, but nothing reads it; use MESH'),
        ('utils.SaveCheckpointConfig.keep', 'it is a setting of T5X; use its counterpart KEEP_CHECKPOINTS'),
        ('train_script.train.eval_period', 'it is a setting of T5X; use its counterpart EVAL_PERIOD'),
    ],
)
def test_macros_and_settings_of_t5x_have_advice(name, advice):
    with pytest.raises(UserError, match=advice):
        loading.load_gin_config(loading.ConfigSources(MODEL, [(name, '1')]), '%MODEL')


def test_flags_of_t5x_work_or_have_advice(capsys):
    for flag in THEIRS['flags']:
        assert main(['train', '--gin_file=models/none.gin', f'--{flag}=1']) == 2
        error = capsys.readouterr().err
        assert 'models/none.gin' in error or (
            flag in gin_files.T5X_NAMES['flags'] and gin_files.T5X_NAMES['flags'][flag] in error
        ), error
