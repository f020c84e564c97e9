"""Compiled programs that outlive a run of the tests: another process reads them, and old ones are removed."""

import functools
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp

from tests.support import kept_programs, paths

_PROGRAM = """
import sys
from tests.support import kept_programs
kept_programs.keep(sys.argv[1])
import jax, jax.numpy as jnp
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))
print('/jax/compilation_cache/cache_hits' in found)
"""


def test_another_process_reads_what_one_has_compiled_until_it_is_old(tmp_path):
    def is_read():
        command = [sys.executable, '-c', _PROGRAM, str(tmp_path)]
        return subprocess.run(command, env=paths.environment(), check=True, capture_output=True, text=True).stdout

    assert [is_read(), is_read()] == ['False\n', 'True\n']
    programs = list(tmp_path.iterdir())
    kept_programs.remove_old(tmp_path)
    assert programs and sorted(tmp_path.iterdir()) == sorted(programs)
    long_ago = time.time() - (kept_programs.DAYS + 1) * 24 * 3600
    os.utime(programs[0], (long_ago, long_ago))
    kept_programs.remove_old(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(programs[1:])


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
