"""A user's tasks.py, tasks/ folder or package works next to the installed `remixer_tasks`."""

import os
import subprocess
import sys
import textwrap

import pytest

from remixer_t5x.cli.main import main
from tests.support import command_folder, temporary_modules
from tests.support.paths import environment

pytestmark = [
    pytest.mark.filterwarnings('ignore::DeprecationWarning'),
    pytest.mark.filterwarnings('ignore::ResourceWarning'),
]

TASK = """
    import seqio
    import tensorflow as tf

    TEXT = ['one two three four five'] * 4


    def examples(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices({'inputs': TEXT, 'targets': TEXT})


    seqio.TaskRegistry.add(
        NAME,
        source=seqio.FunctionDataSource(examples, splits=['train']),
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={name: seqio.Feature(seqio.ByteVocabulary()) for name in ('inputs', 'targets')},
    )
"""
COMMAND = ('data', '--gin_file=data/python_docs.gin', '--gin_file=mine.gin', '--num_examples=1')
SETTINGS = "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 64}\nfrom __gin__ import dynamic_registration\n"


def write_task(path, name):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(TASK).replace('NAME', repr(name)))


def test_a_tasks_module_on_the_path_is_used(tmp_path, warm_python):
    """In a separate process, whose PYTHONPATH begins with the user's folder."""
    write_task(tmp_path / 'tasks.py', 'a_users_task')
    (tmp_path / 'mine.gin').write_text(f"{SETTINGS}import tasks\nMIXTURE_OR_TASK_NAME = 'a_users_task'\n")
    path = os.pathsep.join([str(tmp_path), environment()['PYTHONPATH']])
    completed = subprocess.run(
        [*warm_python.command, '-m', 'remixer_t5x.cli.main', *COMMAND],
        cwd=tmp_path, env=environment(PYTHONPATH=path), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout
    assert completed.stdout.startswith('a_users_task, split train') and 'one two three four five' in completed.stdout


@pytest.fixture
def in_the_users_folder(tmp_path, monkeypatch):
    """Simulates a process that starts in the user's folder; undoes its imports afterwards."""
    with command_folder.working_directory(tmp_path), monkeypatch.context() as patch:
        # The project's `tasks` folder may already be imported.
        for name in [name for name in sys.modules if name.partition('.')[0] == 'tasks']:
            patch.delitem(sys.modules, name)
        patch.syspath_prepend(tmp_path)
        yield
        temporary_modules.unload(tmp_path)


def test_tasks_of_the_users_tasks_folder_and_package_are_found(tmp_path, in_the_users_folder, capsys):
    write_task(tmp_path / 'tasks' / 'mine.py', 'task_of_the_folder')
    write_task(tmp_path / 'my_tasks' / 'more.py', 'task_of_the_package')
    (tmp_path / 'my_tasks' / '__init__.py').touch()
    (tmp_path / 'mine.gin').write_text(f'{SETTINGS}import tasks.mine\nimport my_tasks.more\n')
    for name in ('task_of_the_folder', 'task_of_the_package'):
        assert main([*COMMAND, f'--gin.MIXTURE_OR_TASK_NAME={name}']) == 0
        assert capsys.readouterr().out.startswith(f'{name}, split train')
