"""Compiled programs that outlive a run of the tests."""

import functools
import os
import pathlib
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
    kept_programs.remove_old(tmp_path)
    assert list(tmp_path.iterdir()) == [new]


def test_programs_are_unloaded_once_there_are_many(monkeypatch):
    monkeypatch.setattr(kept_programs, 'MOST_LOADED', 50)
    programs = kept_programs.LoadedPrograms()
    functions = [jax.jit(functools.partial(jnp.add, index)) for index in range(60)]

    def mappings():
        return len(pathlib.Path('/proc/self/maps').read_text().splitlines())

    before = mappings()
    for function in functions:
        function(jnp.ones(3))
    loaded = mappings()
    assert programs.count >= 60
    programs.unload_if_many()
    assert loaded - before > 100 and mappings() < loaded - 100
    assert programs.count == 0
