"""Runs docs/guide/own_task.md up to the section about mixtures: custom tasks, an optimizer and a schedule."""

import json
import os
import pathlib
import re
import shlex

import pytest

from remixer_t5x.cli.main import main
from tests.support import command_folder, feed_forward
from tests.support.paths import ROOT

PAGE = ROOT / 'docs/guide/own_task.md'
WITHOUT_ATTENTION = ''.join(f'{name} = {value}\n' for name, value in feed_forward.SETTINGS.items())


def run_page(page):
    """Runs the bash blocks of a page: writes files, calls remixer-t5x in this process, and runs the rest in a shell."""
    for block in re.findall(r'^```bash\n(.*?)^```$', page, re.DOTALL | re.MULTILINE):
        for name, text in re.findall(r"^cat > (\S+) <<'END'\n(.*?)^END$", block, re.DOTALL | re.MULTILINE):
            # Attention takes long to compile.
            pathlib.Path(name).write_text(text + (WITHOUT_ATTENTION if name == 'mine.gin' else ''))
        commands = re.sub(r'^cat > .*?^END$', '', block, flags=re.DOTALL | re.MULTILINE).replace('\\\n', ' ')
        for line in filter(None, commands.splitlines()):
            if line.startswith('remixer-t5x '):
                assert main(shlex.split(line)[1:]) == 0, line
            else:
                assert os.system(line) == 0, line


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    # test_own_pairs.py tests the commands of the later sections.
    page = PAGE.read_text().partition('## A mixture')[0]
    folder = tmp_path_factory.mktemp('own')
    with command_folder.working_directory(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
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
    assert read_records(runs / 'runs/second/eval/metrics.jsonl', 'validation/reverse_v001')
    answers = [json.loads(line) for line in (runs / 'reversed.jsonl').read_text().splitlines()]
    assert [answer['input'] for answer in answers] == ['abca', 'bbca']
