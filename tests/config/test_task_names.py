"""A task that is given by its name, and T5X's macros that are another one here."""

import ast

import pytest

from remixer_t5x.config import loading, task_names
from remixer_t5x.config.bindings import Bindings
from remixer_t5x.config.loading import Given
from remixer_t5x.config.scan import scan
from remixer_t5x.errors import UserError
from remixer_tasks import names, vocabularies


def final(text):
    bindings = Bindings(task_names.resolved(scan(text, 'user.gin'))).final
    return {f'{binding.scope}/{binding.key}'.lstrip('/'): repr(binding.value) for binding in bindings}


def test_a_name_becomes_the_task_of_that_name():
    found = final("MIXTURE_OR_TASK_NAME = 'en_mix'\nVOCABULARY = 'v'\nDATA_DIR = '/data'\n")
    assert found['MIXTURE_OR_TASK_NAME'] == '@mixture_or_task_name/names.provider()'
    settings = {key: value for key, value in found.items() if 'names.provider' in key}
    assert settings == {
        'mixture_or_task_name/names.provider.name': "'en_mix'",
        'mixture_or_task_name/names.provider.vocabulary': '%VOCABULARY',
        'mixture_or_task_name/names.provider.data_dir': '%DATA_DIR',
    }


@pytest.mark.parametrize('given', ["'en_mix, cogs_v001'", "['en_mix', 'cogs_v001']"])
def test_several_names_are_evaluated_side_by_side(given):
    found = final(f"EVAL_MIXTURE_OR_TASK_NAME = {given}\nMIXTURE_OR_TASK_NAME = @mine.task()\nVOCABULARY = 'v'\n")
    assert found['EVAL_MIXTURE_OR_TASK_NAME'] == '@eval_mixture_or_task_name/names.providers()'
    assert found['eval_mixture_or_task_name/names.providers.names'] == given
    made = names.providers(ast.literal_eval(given), vocabularies.byte())
    assert [one.name for one in made] == ['en_mix', 'cogs_v001']


def test_without_a_vocabulary_it_is_that_of_the_task():
    found = final('MIXTURE_OR_TASK_NAME = @mine.task()\n')
    assert found['MIXTURE_OR_TASK_NAME'] == '@mine.task()'
    assert found['VOCABULARY'] == '@names.vocabulary_of()'
    assert found['names.vocabulary_of.task'] == '%MIXTURE_OR_TASK_NAME'


def test_what_names_no_task_stays_as_it_is():
    statements = scan("VOCABULARY = 'v'\nMODEL_DIR = '/m'\n", 'user.gin')
    assert task_names.resolved(statements) == statements


@pytest.mark.parametrize('module', ['os.path', 'json'])
def test_a_module_of_tasks_is_imported(module):
    text = f"MIXTURE_OR_TASK_MODULE = '{module}'\n"
    statements = task_names.resolved(scan(text, 'user.gin'))
    assert f'import {module}' in [getattr(one, 'format', str)() for one in statements]
    assert 'MIXTURE_OR_TASK_MODULE' not in final(text)


@pytest.mark.parametrize('module', ["'a b'", '3', "'a; import os'"])
def test_a_module_is_a_name(module):
    with pytest.raises(UserError, match='it takes the name of a module, as in my_package.tasks'):
        task_names.resolved(scan(f'MIXTURE_OR_TASK_MODULE = {module}\n', 'user.gin'))


@pytest.mark.parametrize(('name', 'ours'), [('RANDOM_SEED', 'SEED'), ('EVALUATOR_NUM_EXAMPLES', 'EVAL_EXAMPLES')])
@pytest.mark.parametrize('partial', [True, False])
def test_a_macro_of_t5x_is_answered_with_ours(name, ours, partial):
    with pytest.raises(UserError, match=f'{name} is set, but nothing reads it; here it is {ours}'):
        loading.load(Given(['models/t5_1_1.gin', 'sizes/tiny.gin'], [(name, '1')]), '%MODEL', partial=partial)
