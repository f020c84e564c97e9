"""Modules that a test writes are found, whenever Python listed their folder."""

import importlib
import os
import sys

import pytest


def test_a_module_written_in_the_tick_of_a_listing_is_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match='written_in_one_tick'):
        importlib.import_module('written_in_one_tick')
    listed = tmp_path.stat().st_mtime_ns
    (tmp_path / 'written_in_one_tick.py').write_text('VALUE = 1\n')
    os.utime(tmp_path, ns=(listed, listed))
    assert importlib.import_module('written_in_one_tick').VALUE == 1
    del sys.modules['written_in_one_tick']
