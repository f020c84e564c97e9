"""A user's own tasks.py, tasks/ folder or package works next to the installed `remixer_tasks`."""

import os
import subprocess
import sys
import textwrap

from tests.support.paths import environment

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
SETTINGS = "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 64}\nfrom __gin__ import dynamic_registration\n"


def write_task(path, name):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(TASK).replace('NAME', repr(name)))


def first_examples(folder, gin_text, *arguments):
    """What `remixer-t5x data` prints for the user's gin file after a shipped one; `folder` is first on PYTHONPATH."""
    (folder / 'mine.gin').write_text(SETTINGS + gin_text)
    command = [sys.executable, '-m', 'remixer_t5x.cli.main', 'data', '--gin_file=data/python_docs.gin']
    path = os.pathsep.join([str(folder), environment()['PYTHONPATH']])
    done = subprocess.run(
        [*command, '--gin_file=mine.gin', '--num_examples=1', *arguments],
        cwd=folder, env=environment(PYTHONPATH=path), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_tasks_module_on_the_path(tmp_path):
    write_task(tmp_path / 'tasks.py', 'a_users_task')
    shown = first_examples(tmp_path, "import tasks\nMIXTURE_OR_TASK_NAME = 'a_users_task'\n")
    assert shown.startswith('a_users_task, split train') and 'one two three four five' in shown


def test_a_tasks_folder_and_a_package_of_another_name(tmp_path):
    write_task(tmp_path / 'tasks' / 'mine.py', 'task_of_the_folder')
    write_task(tmp_path / 'my_tasks' / 'more.py', 'task_of_the_package')
    (tmp_path / 'my_tasks' / '__init__.py').touch()
    imports = 'import tasks.mine\nimport my_tasks.more\n'
    shown = first_examples(tmp_path, f"{imports}MIXTURE_OR_TASK_NAME = 'task_of_the_folder'\n")
    assert shown.startswith('task_of_the_folder, split train')
    other = ['--gin.MIXTURE_OR_TASK_NAME=task_of_the_package']
    assert first_examples(tmp_path, imports, *other).startswith('task_of_the_package, split train')
