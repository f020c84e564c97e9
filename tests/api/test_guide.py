"""Runs the Python examples of docs/guide/python.md."""

import dataclasses
import pathlib
import re
import runpy

import jax
import numpy as np
import pytest

import remixer_t5x
from tests.support.saved_run import write_run

PAGE = (pathlib.Path(__file__).parents[2] / 'docs/guide/python.md').read_text()
LOADING, EVALUATING, FINETUNING, ADAPTING, TRAINING = re.findall(
    r'^```python\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE
)


@pytest.fixture(autouse=True)
def _working_directory(clean_gin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_code(text):
    path = pathlib.Path('page.py')
    path.write_text(text)
    return runpy.run_path(str(path))


@pytest.fixture
def first_run(tmp_path):
    (tmp_path / 'runs').mkdir()
    write_run(tmp_path / 'runs' / 'first', steps=(1,))


def test_the_loading_example_runs(first_run, capsys):
    names = run_code(LOADING)
    assert names['encoded'].hidden.shape == (2, 19, 16)
    # Random parameters generate random bytes, including line ends.
    printed = capsys.readouterr().out
    assert re.search(r'\n\[ *-', printed) and '(2, 19, 16) [10 19] (2, 16)' in printed and "'perplexity'" in printed


def test_the_evaluation_example_prints_the_metrics_of_a_task(first_run, capsys):
    task = 'task = toy_tasks.labelled(trained.vocabulary)'
    imports = 'import remixer_t5x\nfrom tests.support import toy_tasks\n'
    run_code(f"{imports}trained = remixer_t5x.load('runs/first')\n{task}\n{EVALUATING}")
    assert "{'accuracy': 0.0" in capsys.readouterr().out


def test_the_finetuning_and_saving_example_runs(first_run, capsys):
    names = run_code(FINETUNING)
    before, after = map(float, re.findall(r'\d+\.\d+', capsys.readouterr().out))
    assert after < before
    again = remixer_t5x.load('runs/tuned')
    assert again.loss(names['batch']) == names['tuned'].loss(names['batch'])


def test_the_example_of_adapters_trains_only_adapters(first_run):
    names = run_code(f'{FINETUNING}\n{ADAPTING}\nstate, _ = step(state, batch)')
    adapters, frozen = names['trainable'].split_params(names['state'].params, names['optimizer'].trainable)
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(adapters))
    jax.tree.map(np.testing.assert_array_equal, frozen, names['trained'].params)
    adapted = dataclasses.replace(names['trained'], model=names['model'], params=names['state'].params)
    adapted.save('runs/adapted')
    assert adapted.loss(names['batch']) == remixer_t5x.load('runs/adapted').loss(names['batch'])


def test_the_custom_training_loop_learns_and_is_short():
    names = run_code(TRAINING)
    assert names['losses'][-1] < 0.5 * names['losses'][0]
    assert len([line for line in TRAINING.splitlines() if line.strip()]) < 30
    assert int(names['state'].step) == 80
