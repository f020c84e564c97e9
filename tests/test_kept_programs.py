"""The persistent cache of compiled programs for tests."""

import functools
import os
import time

import jax
import jax.numpy as jnp

from tests.support import kept_programs


def test_old_programs_are_removed(tmp_path):
    new, old = tmp_path / 'new', tmp_path / 'old'
    new.touch()
    old.touch()
    long_ago = time.time() - (kept_programs.DAYS + 1) * 24 * 3600
    os.utime(old, (long_ago, long_ago))
    kept_programs.remove_old_entries(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_programs_are_unloaded_before_there_are_too_many_mappings(monkeypatch):
    programs = kept_programs.LoadedPrograms()
    functions = [jax.jit(functools.partial(jnp.add, index)) for index in range(60)]
    before = kept_programs.count_mappings()
    for function in functions:
        function(jnp.ones(3))
    loaded = kept_programs.count_mappings()
    assert loaded - before > 100
    monkeypatch.setattr(kept_programs, 'CHECK_PERIOD', 50)
    monkeypatch.setattr(kept_programs, 'MAX_MAPPINGS', loaded - 1)
    programs.unload_if_many()
    assert kept_programs.count_mappings() < loaded - 100
