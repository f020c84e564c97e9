"""Files that several tests read, as modules: pytest's importlib mode has no path to import them by."""

import importlib.util
import pathlib

import pytest

from tests.support import references

HERE = pathlib.Path(__file__).parent


def _load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='session')
def v1_0_maker():
    """`make_t5_v1_0_tiny.py`, or a skip where what it needs is missing."""
    references.need('torch', 'transformers')
    return _load(HERE.parent / 'golden' / 'make_t5_v1_0_tiny.py')
