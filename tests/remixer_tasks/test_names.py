"""Tasks and mixtures have T5's names, which golden/make_t5_names.py recorded."""

import json
import pathlib
import subprocess
import sys

import pytest
import seqio

from remixer_t5x.errors import UserError
from remixer_tasks import names, vocabularies
from tests.support import references

T5 = json.loads((pathlib.Path(__file__).parent / 'golden' / 't5_names.json').read_text())
BYTES = vocabularies.byte()
# Unimplemented tasks of T5, in addition to those with sentinels or a prefix LM objective.
UNIMPLEMENTED = {
    'c4_v220_iid_denoising',
    'glue_wnli_v002_simple_eval',
    'trivia_qa_v010',
    'squad_v010',
    'squad_v010_context_free',
    'squad_v010_allanswers_span',
}


def is_implemented(name):
    return name not in UNIMPLEMENTED and 'sentinel' not in name and 'prefix_lm_objective' not in name


def test_every_implemented_task_of_t5_has_its_name_and_is_built_without_reading_data(tmp_path, cache_folder):
    expected = [name for name in T5['tasks'] if is_implemented(name)]
    assert len(expected) == 40
    for name in expected:
        task = names.find_task(name, BYTES, str(tmp_path))
        assert task.name == name and isinstance(task, seqio.Task) and task.splits and task.output_features
    assert not cache_folder.exists()


@pytest.mark.parametrize(
    'name',
    [
        *('en_mix', 'glue_mnli_and_dev_v002', 'glue_v002_proportional', 'super_glue_v102_proportional'),
        'wsc_dpr_simple_proportional',
    ],
)
def test_mixtures_of_t5_have_its_tasks_and_rates(name, tmp_path):
    mixture = names.find_task(name, BYTES, str(tmp_path))
    assert mixture.name == name
    rates, tasks = dict(mixture._task_to_rate), {task.name: task for task in mixture.tasks}
    expected = {task: rate for task, rate in T5['mixtures'][name].items() if is_implemented(task)}
    assert set(rates) == set(expected)
    for task, rate in expected.items():
        if rate is not None:
            actual = rates[task](tasks[task]) if callable(rates[task]) else rates[task]
            assert actual == rate, task


def test_an_unknown_name_is_rejected_with_the_nearest_name():
    with pytest.raises(UserError, match="got 'super_glue_boolq'; .* super_glue_boolq_v102"):
        names.find_task('super_glue_boolq')


def test_registered_names_take_precedence(monkeypatch):
    monkeypatch.setattr(seqio.TaskRegistry, '_REGISTRY', {'en_mix': object()})
    assert names.find_provider('en_mix', BYTES) == 'en_mix'
    assert names.find_provider('glue_rte_v002', BYTES).name == 'glue_rte_v002'


def test_t5_can_register_its_tasks_after_ours_were_made():
    references.require('t5')
    code = """
from remixer_tasks import names, vocabularies
from tests.support import references
ours = names.find_task('glue_rte_v002', vocabularies.byte())
import t5.data.mixtures, seqio
assert names.find_provider('glue_rte_v002') == 'glue_rte_v002'
assert seqio.get_mixture_or_task('glue_rte_v002') is not ours
"""
    subprocess.run([sys.executable, '-c', code], check=True)
