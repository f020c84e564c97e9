"""Runs docs/guide/own_task.md up to its last section: custom tasks, a custom optimizer and a custom schedule."""

import contextlib
import json
import os
import pathlib
import re
import shlex

import pytest

from remixer_t5x.cli.main import main
from tests.support import command_folder
from tests.support.paths import ROOT

PAGE = ROOT / 'docs/guide/own_task.md'


def run_page(page):
    """Runs the bash blocks of a page: writes files, calls remixer-t5x in this process, and runs the rest in a shell."""
    for block in re.findall(r'^```bash\n(.*?)^```$', page, re.DOTALL | re.MULTILINE):
        for name, text in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block, re.DOTALL | re.MULTILINE):
            pathlib.Path(name).write_text(text)
        commands = re.sub(r'^cat > .*?^END$', '', block, flags=re.DOTALL | re.MULTILINE).replace('\\\n', ' ')
        for line in filter(None, commands.splitlines()):
            if line.startswith('remixer-t5x '):
                assert main(shlex.split(line)[1:]) == 0, line
            else:
                assert os.system(line) == 0, line


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    # test_own_pairs.py tests the commands of the last section.
    page = PAGE.read_text().partition('## A small language')[0]
    folder = tmp_path_factory.mktemp('own')
    with command_folder.working_directory(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with (folder / 'output.txt').open('w') as file, contextlib.redirect_stdout(file):
            run_page(page)
        yield folder


def read_records(path, kind):
    lines = pathlib.Path(path).read_text().splitlines()
    return [record for record in map(json.loads, lines) if record['kind'] == kind]


def test_the_page_runs_and_the_schedule_is_used(runs):
    train = read_records(runs / 'runs/first/metrics.jsonl', 'train')
    assert [record['step'] for record in train] == [20, 40]
    # The learning rate of the last update, whose step is one less.
    assert train[0]['learning_rate'] == pytest.approx(0.02 * 19 / 20)
    assert train[1]['loss'] < train[0]['loss']


def test_finetuning_has_a_held_out_loss_and_metrics(runs):
    path = runs / 'runs/second/metrics.jsonl'
    losses, metrics = read_records(path, 'held_out/reverse_v001'), read_records(path, 'eval/reverse_v001')
    assert [record['step'] for record in losses] == [record['step'] for record in metrics]
    assert losses[-1]['loss'] < losses[0]['loss'] and 0 <= metrics[-1]['accuracy'] <= 100
    assert read_records(runs / 'runs/second/eval/metrics.jsonl', 'validation/reverse_v001')
    answers = [json.loads(line) for line in (runs / 'reversed.jsonl').read_text().splitlines()]
    assert [answer['input'] for answer in answers] == ['abca', 'bbca']


def test_each_task_of_a_mixture_has_a_loss_metrics_and_a_best_checkpoint(runs):
    path, tasks = runs / 'runs/mixed/metrics.jsonl', ('reverse_v001', 'copy_v001')
    assert all(read_records(path, f'held_out/{task}') for task in tasks)
    accuracies = {task: read_records(path, f'eval/{task}')[0]['accuracy'] for task in tasks}
    (average,) = read_records(path, 'eval/average')
    assert average['average'] == pytest.approx(sum(accuracies.values()) / 2)
    assert {folder.name for folder in (runs / 'runs/mixed/best').iterdir()} == {*tasks, 'average'}
    assert 'average over 2 tasks, each at its best step: ' in (runs / 'output.txt').read_text()
