"""The public names of `remixer_t5x`; importing it loads no library."""

import ast
import pathlib
import subprocess
import sys

import pytest

import remixer_t5x

LIBRARIES = {'jax', 'flax', 'numpy', 'tensorflow', 'seqio', 'gin', 'remixer_tasks'}


def test_the_import_loads_no_library():
    """`tests/test_imports.py` checks what a train step loads."""
    text = f'import remixer_t5x, sys; dir(remixer_t5x); assert not {LIBRARIES!r} & {{*sys.modules}}'
    subprocess.run([sys.executable, '-c', text], check=True)


@pytest.mark.parametrize('name', remixer_t5x.__all__)
def test_every_public_name_exists_and_is_documented(name):
    assert name in dir(remixer_t5x)
    value = getattr(remixer_t5x, name)
    assert name == '__version__' or value.__doc__
    assert getattr(remixer_t5x, name) is value


def test_type_checkers_see_the_same_names():
    tree = ast.parse(pathlib.Path(remixer_t5x.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    static = {alias.asname: f'{line.module}.{alias.name}' for line in block.body for alias in line.names}
    definitions = remixer_t5x._DEFINITIONS.items()
    lazy = {name: '.'.join(filter(None, ('remixer_t5x', *parts))) for name, parts in definitions}
    assert static == lazy
