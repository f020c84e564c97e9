"""The persistent cache of compiled programs for tests."""

import functools
import os
import time

import jax
import jax.numpy as jnp

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
    programs = program_cache.LoadedPrograms()
    functions = [jax.jit(functools.partial(jnp.add, index)) for index in range(60)]
    before = program_cache.count_mappings()
    for function in functions:
        function(jnp.ones(3))
    loaded = program_cache.count_mappings()
    assert loaded - before > 100
    monkeypatch.setattr(program_cache, 'CHECK_PERIOD', 50)
    # Other threads and the buffer that reads the list of mappings change their number by a few.
    monkeypatch.setattr(program_cache, 'MAX_MAPPINGS', loaded - 50)
    programs.unload_if_many()
    assert program_cache.count_mappings() < loaded - 100
