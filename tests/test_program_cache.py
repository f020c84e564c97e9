"""The persistent cache of compiled programs for tests."""

import os
import time

import jax

from tests.support import program_cache


def test_old_programs_are_removed(tmp_path):
    new, old = tmp_path / 'new', tmp_path / 'old'
    new.touch()
    old.touch()
    long_ago = time.time() - (program_cache.DAYS + 1) * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    program_cache.remove_old_entries(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_programs_are_unloaded_before_there_are_too_many_mappings(monkeypatch):
    cleared = []
    monkeypatch.setattr(jax, 'clear_caches', lambda: cleared.append(True))
    monkeypatch.setattr(program_cache, 'CHECK_PERIOD', 1)
    programs = program_cache.LoadedPrograms()
    for mappings in (program_cache.MAX_MAPPINGS, program_cache.MAX_MAPPINGS + 1):
        monkeypatch.setattr(program_cache, 'count_mappings', lambda count=mappings: count)
        jax.jit(lambda x, number=mappings: x + number)(1.0)
        programs.unload_if_many()
        assert len(cleared) == mappings - program_cache.MAX_MAPPINGS
