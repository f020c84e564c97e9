"""Tasks given by name, and the module that registers them."""

import gin
import pytest

from remixer_t5x.config import loading, resolved
from remixer_t5x.config.loading import ConfigSources
from remixer_t5x.errors import UserError
from remixer_tasks import names, vocabularies

TASK, EVALUATED, VOCABULARY = 'MIXTURE_OR_TASK_NAME', 'EVAL_MIXTURE_OR_TASK_NAME', 'VOCABULARY'
BYTES = (VOCABULARY, '@remixer_tasks.vocabularies.byte()')


def load(*flags, macro=TASK):
    loading.load(ConfigSources(flags=flags), f'%{macro}')


def test_a_task_name_is_replaced_by_the_task(tmp_path):
    load((TASK, 'en_mix'), BYTES, ('DATA_DIR', str(tmp_path)))
    mixture = resolved.macro(TASK)
    assert mixture.name == 'en_mix'
    assert mixture.output_features['targets'].vocabulary == vocabularies.byte()


@pytest.mark.parametrize('tasks', ['en_mix, cogs_v001', "['en_mix', 'cogs_v001']"])
def test_several_task_names_become_a_list_of_tasks(tasks):
    load((EVALUATED, tasks), (TASK, 'en_mix'), BYTES, macro=EVALUATED)
    assert [task.name for task in resolved.macro(EVALUATED)] == ['en_mix', 'cogs_v001']


def test_the_default_vocabulary_is_that_of_the_task():
    load((TASK, 'python_docs_v001_span_corruption'), macro=VOCABULARY)
    assert repr(gin.query_parameter('%VOCABULARY')) == '@names.vocabulary_of()'
    task = gin.get_bindings(names.vocabulary_of, resolve_references=False)['task']
    assert repr(task) == '%MIXTURE_OR_TASK_NAME'


def test_a_reference_to_a_task_is_unchanged():
    loading.load(ConfigSources(['data/c4.gin']), f'%{TASK}')
    assert repr(gin.query_parameter(f'%{TASK}')) == '@pretraining.span_corruption()'


def test_a_module_of_tasks_is_imported(tmp_path, monkeypatch):
    (tmp_path / 'my_registered_tasks.py').write_text('imported = True\n')
    monkeypatch.syspath_prepend(tmp_path)
    load(('MIXTURE_OR_TASK_MODULE', 'my_registered_tasks'), (TASK, 'en_mix'))
    assert 'import my_registered_tasks' in loading.config_text()
    load(('MIXTURE_OR_TASK_MODULE', 'None'), (TASK, 'en_mix'))
    assert 'my_registered_tasks' not in loading.config_text()


@pytest.mark.parametrize('module', ['a b', '3', 'a; import os'])
def test_an_invalid_module_name_is_rejected(module):
    with pytest.raises(UserError, match='MIXTURE_OR_TASK_MODULE must be the name of a module, as in my_package.tasks'):
        load(('MIXTURE_OR_TASK_MODULE', module), (TASK, 'en_mix'))
