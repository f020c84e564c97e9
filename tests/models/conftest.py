"""Files that several tests read, as modules: pytest's importlib mode has no path to import them by."""

import importlib.util
import pathlib

import pytest

from tests.support import references

TESTS = pathlib.Path(__file__).parents[1]


def _load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='session')
def toy():
    from tests.models import toy_generation

    return toy_generation


@pytest.fixture(scope='session')
def t5_parity():
    """A copy of `test_t5_parity.py`: our model of Hugging Face's tiny T5, and parameters from its weights."""
    return _load(TESTS / 'models' / 'test_t5_parity.py')


@pytest.fixture(scope='session')
def hugging_face():
    """`make_t5_generate.py`, or a skip where what it needs is missing."""
    references.need('torch', 'transformers')
    return _load(TESTS / 'golden' / 'make_t5_generate.py')
