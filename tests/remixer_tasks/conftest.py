import os
import pathlib

import pytest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """No test reads or leaves anything in the user's cache."""
    folder = tmp_path / 'cache'
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(folder))
    return folder


@pytest.fixture
def real_data():
    """Folder with real data, where the environment names one."""
    folder = os.environ.get('REMIXER_T5X_DATA')
    if not folder:
        pytest.skip('REMIXER_T5X_DATA is not set: no real data to read')
    return pathlib.Path(folder)
