"""A user's tasks.py works next to the installed `remixer_tasks`."""

import os
import subprocess
import textwrap

import pytest

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
