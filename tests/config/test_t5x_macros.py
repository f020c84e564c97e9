"""Every macro and flag of T5X's scripts works here, or is answered with what does the same; golden/make_t5x_macros.py
made the list."""

import json
import pathlib
import re

import pytest

from remixer_t5x.cli import infer
from remixer_t5x.cli.main import main
from remixer_t5x.config import loading, t5x_macros
from remixer_t5x.config.bindings import Bindings, macros_read
from remixer_t5x.config.scan import scan
from remixer_t5x.errors import UserError

T5X = json.loads((pathlib.Path(__file__).parents[1] / 'golden/t5x_macros.json').read_text())
MODEL = ['models/t5_1_1.gin', 'sizes/tiny.gin', 'hardware/cpu.gin', 'data/python_docs.gin']
TRAINING = [*MODEL, 'optimizers/adamw_rms.gin']
GIVEN = {'MODEL_DIR': 'given', 'INITIAL_CHECKPOINT_PATH': 'None', 'CHECKPOINT_PATH': 'given'}
RUN = 'remixer_t5x.train.settings.Run'
# gin files, those that the command reads by itself, what it calls, and whether it reads only a part of them.
COMMANDS = {
    'train': ([*TRAINING, 'runs/pretrain.gin'], [], RUN, False),
    'finetune': ([*TRAINING, 'runs/finetune.gin'], [], RUN, False),
    'eval': (
        MODEL, ['runs/eval.gin'], 'remixer_t5x.evaluate.checkpoint_evaluation.CheckpointEvaluation', True
    ),
    'infer': (MODEL, ['runs/infer.gin'], 'remixer_t5x.evaluate.text_inference.TextInference', True),
}  # fmt: skip
# Commands that read a part of a file leave unread what others read. T5X's mixtures of experts name the batch of an
# evaluation so; `infer` takes the task's vocabulary where there is no VOCABULARY.
LEFT_UNREAD = {('eval', 'BATCH_SIZE'), ('infer', 'BATCH_SIZE'), ('infer', 'MIXTURE_OR_TASK_NAME')}
UNREAD = 'not read'
VALUES = {'MIXTURE_OR_TASK_MODULE': 'json', 'TRAIN_STEPS': '3', 'TRAIN_STEPS_RELATIVE': '3'}


def answer(command, macro):
    """'' where the command reads the macro, else what it says; UNREAD where it says nothing."""
    files, base, root, partial = COMMANDS[command]
    read = macros_read(Bindings([s for f in (*base, *files) for s in statements(f)]).final)
    flags = {**{name: value for name, value in GIVEN.items() if name in read}, macro: VALUES.get(macro, 'given')}
    try:
        defaults = infer.DEFAULTS if command == 'infer' else {}
        loading.load(loading.Given(files, list(flags.items()), base=base, defaults=defaults), root, partial=partial)
    except UserError as error:
        return str(error)
    return '' if macro in read or macro == 'MIXTURE_OR_TASK_MODULE' else UNREAD


def statements(file):
    """Of a shipped file, with the parts that it includes."""
    path = loading.files.shipped_folder() / file
    for one in scan(path.read_text(), file):
        if hasattr(one, 'filename'):
            yield from statements(one.filename)
        else:
            yield one


@pytest.mark.parametrize('command', COMMANDS)
def test_every_macro_of_a_script_of_t5x_works_or_is_answered(command):
    said = {macro: answer(command, macro) for macro in T5X['macros'][command]}
    odd = {macro: line for macro, line in said.items() if line and t5x_macros.INSTEAD.get(macro, '?') not in line}
    assert odd == {macro: UNREAD for at, macro in LEFT_UNREAD if at == command}
    assert said['TASK_FEATURE_LENGTHS'] == '' and 'here it is MESH' in said['NUM_MODEL_PARTITIONS']


def test_every_macro_of_t5xs_examples_works_or_is_answered_somewhere():
    for macro in T5X['macros']['any']:
        answers = [answer(command, macro) for command in COMMANDS]
        assert '' in answers or all(t5x_macros.INSTEAD[macro] in line for line in answers), macro


def test_the_answers_name_macros_that_exist():
    known = {name for file in loading.files.shipped_files() for s in statements(file) for name in names_in(s)}
    answers = ' '.join([*t5x_macros.INSTEAD.values(), *t5x_macros.SETTINGS.values(), *t5x_macros.FLAGS.values()])
    named = set(re.findall(r'\b[A-Z]{2,}(?:_[A-Z]+)+\b', answers))
    assert named - known == set()
    assert len(named) > 15


def names_in(statement):
    return macros_read([statement]) | {statement.key} if hasattr(statement, 'key') else set()


def test_train_steps_of_t5x_is_refused_where_it_would_be_another_number():
    files = [*TRAINING, 'runs/finetune.gin']
    flags = [('MODEL_DIR', 'given'), ('INITIAL_CHECKPOINT_PATH', 'given'), ('TRAIN_STEPS', '1020000')]
    with pytest.raises(UserError, match='TRAIN_STEPS is 1020000 .*includes the steps .*give TRAIN_STEPS_RELATIVE'):
        loading.load(loading.Given(files, flags), RUN, partial=False)
    (steps,) = loading.values(loading.Given(files, [*flags[:2], ('TRAIN_STEPS_RELATIVE', '7')]), 'TRAIN_STEPS')
    assert steps == 7


@pytest.mark.parametrize(
    ('setting', 'ours'),
    [('utils.SaveCheckpointConfig.keep', 'KEEP_CHECKPOINTS'), ('train_script.train.eval_period', 'EVAL_PERIOD')],
)
def test_a_setting_of_t5x_is_answered_with_the_macro(setting, ours):
    with pytest.raises(UserError, match=f'{setting}: that is a setting of T5X; here it is {ours}'):
        loading.load(loading.Given(MODEL, [(setting, '1')]), '%MODEL')


@pytest.mark.parametrize('flag', T5X['flags'])
def test_a_flag_of_t5x_works_or_is_answered(flag, capsys):
    assert main(['train', '--gin_file=models/none.gin', f'--{flag}=x']) == 2
    said = capsys.readouterr().err
    assert 'models/none.gin' in said or (flag in t5x_macros.FLAGS and t5x_macros.FLAGS[flag] in said), said
