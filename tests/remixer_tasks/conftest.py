import os
import pathlib
import sys

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """Redirects the cache to a temporary folder."""
    folder = tmp_path / 'cache'
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(folder))
    return folder


@pytest.fixture
def real_data():
    """Returns the folder REMIXER_T5X_DATA with real data; skips the test if it is not set."""
    folder = os.environ.get('REMIXER_T5X_DATA')
    if not folder:
        pytest.skip('REMIXER_T5X_DATA is not set: no real data to read')
    return pathlib.Path(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs tests without AutoGraph, as training runs do, because it takes most of the time needed to open a task."""
    if 'tensorflow' in sys.modules:
        pyfuncitem.obj = sys.modules['tensorflow'].autograph.experimental.do_not_convert(pyfuncitem.obj)
