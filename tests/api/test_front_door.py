"""The public names of `remixer_t5x`; importing it loads no library."""

import ast
import inspect
import pathlib
import re
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


# Arguments that are trees of arrays, for which JAX has no type.
ARRAY_TREES = {'params', 'opt_state', 'boxed_params', 'param_shardings', 'init', 'optimizer', 'return'}


def public_signatures():
    """Yields the name and value of each public function, class and method."""
    for name in {*remixer_t5x.__all__} - {'__version__', 'testing'}:
        value = getattr(remixer_t5x, name)
        yield name, value
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(function, 'fget', getattr(function, 'func', getattr(function, '__func__', function)))
            is_ours = inspect.isfunction(function) and function.__module__.startswith('remixer_t5x')
            if is_ours and (not method.startswith('_') or method == '__call__'):
                yield f'{name}.{method}', function
    yield from ((name, getattr(remixer_t5x.testing, name)) for name in remixer_t5x.testing.__all__)


def test_public_signatures_have_types():
    """`Any` is only used for trees of arrays."""
    for name, value in public_signatures():
        hints = inspect.get_annotations(value)
        vague = {hint for hint, kind in hints.items() if re.search(r'\bAny\b', str(kind))}
        assert vague <= ARRAY_TREES, f'{name}: {sorted(vague)}'
        if inspect.isfunction(value):
            missing = {*inspect.signature(value).parameters, 'return'} - {'self', *hints}
            assert not missing, f'{name}: {sorted(missing)}'
