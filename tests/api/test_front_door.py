"""`import remixer_t5x`: what it offers, and that it is quick."""

import subprocess
import sys

import pytest

import remixer_t5x

LIBRARIES = ('jax', 'flax', 'numpy', 'tensorflow', 'seqio', 'gin', 'remixer_tasks')


def loaded_after(program):
    text = f'{program}\nimport sys\nprint([name for name in {LIBRARIES} if name in sys.modules])'
    done = subprocess.run([sys.executable, '-c', text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_it_loads_no_library():
    assert loaded_after('import remixer_t5x; dir(remixer_t5x)') == '[]'


def test_a_train_step_loads_neither_tensorflow_nor_gin():
    loaded = loaded_after('import remixer_t5x as r; r.make_train_step, r.plan_train_state, r.adamw_rms, r.Partitioner')
    assert loaded == "['jax', 'flax', 'numpy']"


@pytest.mark.parametrize('name', remixer_t5x.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert name in dir(remixer_t5x)
    value = getattr(remixer_t5x, name)
    assert name == '__version__' or value.__doc__
    assert getattr(remixer_t5x, name) is value


def test_static_tools_know_the_same_names():
    import ast
    import pathlib

    tree = ast.parse(pathlib.Path(remixer_t5x.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    static = {alias.asname: f'{line.module}.{alias.name}' for line in block.body for alias in line.names}
    places = remixer_t5x._PLACES.items()
    lazy = {name: '.'.join(filter(None, ('remixer_t5x', module, there))) for name, (module, there) in places}
    assert static == lazy


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'no_such_name'"):
        remixer_t5x.no_such_name  # noqa: B018
