"""The persistent compilation cache."""

import os
import subprocess
import sys

import pytest

from remixer_t5x.devices import compilation_cache


def test_the_cache_is_below_the_configured_folder(tmp_path):
    environment = {'REMIXER_T5X_CACHE': str(tmp_path)}
    compilation_cache.enable_compilation_cache(environment)
    folder = tmp_path / 'compiled' / compilation_cache.get_machine_name()
    assert environment['JAX_COMPILATION_CACHE_DIR'] == str(folder) and folder.is_dir()
    assert int(environment['JAX_COMPILATION_CACHE_MAX_SIZE']) == compilation_cache.MAX_BYTES


@pytest.mark.parametrize('variables', [{'JAX_COMPILATION_CACHE_DIR': '/mine'}, {'REMIXER_T5X_CACHE': '/dev/null'}])
def test_the_environment_is_unchanged_if_the_cache_is_set_or_not_writable(tmp_path, variables):
    environment = {'REMIXER_T5X_CACHE': str(tmp_path), **variables}
    compilation_cache.enable_compilation_cache(environment)
    assert environment == {'REMIXER_T5X_CACHE': str(tmp_path), **variables}
    assert not list(tmp_path.iterdir())


_PROGRAM = """
from remixer_t5x.devices import compilation_cache
compilation_cache.MIN_COMPILE_SECONDS = 0
compilation_cache.enable_compilation_cache()
import jax, jax.numpy as jnp
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))
print('/jax/compilation_cache/cache_hits' in events)
"""


def test_jax_reuses_programs_of_other_processes(tmp_path):
    environment = {name: value for name, value in os.environ.items() if '_CACHE' not in name}
    environment |= {'REMIXER_T5X_CACHE': str(tmp_path), 'JAX_PLATFORMS': 'cpu'}
    run = [sys.executable, '-c', _PROGRAM]
    runs = [subprocess.run(run, env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [run.stdout for run in runs] == ['False\n', 'True\n'], [run.stderr for run in runs]
