"""Every macro and flag of T5X's scripts works or has advice; golden/make_t5x_macros.py lists them."""

import functools
import json
import pathlib
import re

import pytest

from remixer_t5x.cli import infer
from remixer_t5x.cli.main import main
from remixer_t5x.config import gin_files, loading
from remixer_t5x.errors import UserError

THEIRS = json.loads((pathlib.Path(__file__).parents[1] / 'golden/t5x_macros.json').read_text())
MODEL = ['models/t5_1_1.gin', 'sizes/tiny.gin', 'hardware/cpu.gin', 'data/python_docs.gin']
TRAINING = [*MODEL, 'optimizers/adamw_rms.gin']
REQUIRED_VALUES = {'MODEL_DIR': 'given', 'INITIAL_CHECKPOINT_PATH': 'None', 'CHECKPOINT_PATH': 'given'}
RUN = 'remixer_t5x.train.settings.Run'
# (gin files, files that the command adds, function that it calls, whether it reads only a part of them)
COMMANDS = {
    'train': ([*TRAINING, 'runs/pretrain.gin'], [], RUN, False),
    'finetune': ([*TRAINING, 'runs/finetune.gin'], [], RUN, False),
    'eval': (
        MODEL, ['runs/eval.gin'], 'remixer_t5x.evaluate.checkpoint_evaluation.CheckpointEvaluation', True
    ),
    'infer': (MODEL, ['runs/infer.gin'], 'remixer_t5x.evaluate.text_inference.TextInference', True),
}  # fmt: skip
# Macros of other commands that a command ignores; T5X's mixtures of experts set BATCH_SIZE for all commands.
IGNORED = {('eval', 'BATCH_SIZE'), ('infer', 'BATCH_SIZE')}
UNREAD = 'not read'
VALUES = {'MIXTURE_OR_TASK_MODULE': 'json', 'TRAIN_STEPS': '3', 'TRAIN_STEPS_RELATIVE': '3'}


@functools.cache
def macros_read(command):
    files, base, *_ = COMMANDS[command]
    texts = [text for file in (*base, *files) for text in gin_files.GinReader((), ()).read(file)]
    return {name for text in texts for name in text.referenced_macros}


def find_error(command, macro):
    """Returns '' if the command reads the macro, the error message if it raises one, and UNREAD otherwise."""
    files, base, root, partial = COMMANDS[command]
    read = macros_read(command)
    flags = {
        **{name: value for name, value in REQUIRED_VALUES.items() if name in read},
        macro: VALUES.get(macro, 'given'),
    }
    try:
        defaults = infer.DEFAULTS if command == 'infer' else {}
        loading.load_gin_config(
            loading.ConfigSources(files, list(flags.items()), base=base, defaults=defaults), root, partial=partial
        )
    except UserError as error:
        # Not every macro accepts a string.
        return '' if f'{macro} must be' in str(error) else str(error)
    return '' if macro in read or macro == 'MIXTURE_OR_TASK_MODULE' else UNREAD


@pytest.mark.parametrize('command', COMMANDS)
def test_macros_of_t5x_scripts_work_or_have_advice(command):
    errors = {macro: find_error(command, macro) for macro in THEIRS['macros'][command]}
    unexpected = {
        macro: line
        for macro, line in errors.items()
        if line and gin_files.T5X_NAMES['macros'].get(macro, '?') not in line
    }
    assert unexpected == {macro: UNREAD for name, macro in IGNORED if name == command}
    assert errors['TASK_FEATURE_LENGTHS'] == '' and 'use MESH' in errors['NUM_MODEL_PARTITIONS']


def test_macros_of_t5x_examples_work_or_have_advice():
    for macro in THEIRS['macros']['any']:
        is_read = any(not find_error(command, macro) for command in COMMANDS)
        assert is_read or all(
            gin_files.T5X_NAMES['macros'][macro] in find_error(command, macro) for command in COMMANDS
        ), macro


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
    ('setting', 'ours'),
    [('utils.SaveCheckpointConfig.keep', 'KEEP_CHECKPOINTS'), ('train_script.train.eval_period', 'EVAL_PERIOD')],
)
def test_settings_of_t5x_have_advice(setting, ours):
    with pytest.raises(UserError, match=f'{setting}: .*it is a setting of T5X; use its counterpart {ours}'):
        loading.load_gin_config(loading.ConfigSources(MODEL, [(setting, '1')]), '%MODEL')


def test_flags_of_t5x_work_or_have_advice(capsys):
    for flag in THEIRS['flags']:
        assert main(['train', '--gin_file=models/none.gin', f'--{flag}=1']) == 2
        error = capsys.readouterr().err
        assert 'models/none.gin' in error or (
            flag in gin_files.T5X_NAMES['flags'] and gin_files.T5X_NAMES['flags'][flag] in error
        ), error
