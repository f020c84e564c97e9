"""Where compiled programs are kept, and who decides it."""

import os
import subprocess
import sys

import pytest

from remixer_t5x.devices import compilation_cache


def test_the_cache_is_below_the_projects_cache_folder(tmp_path):
    environment = {'REMIXER_T5X_CACHE': str(tmp_path)}
    compilation_cache.enable(environment)
    folder = tmp_path / 'compiled' / compilation_cache.machine()
    assert environment['JAX_COMPILATION_CACHE_DIR'] == str(folder) and folder.is_dir()
    assert int(environment['JAX_COMPILATION_CACHE_MAX_SIZE']) == compilation_cache.MOST_BYTES


@pytest.mark.parametrize(
    'given', [{'JAX_COMPILATION_CACHE_DIR': '/mine'}, {'JAX_ENABLE_COMPILATION_CACHE': 'false'}], ids=str
)
def test_what_the_user_has_set_stays(tmp_path, given):
    environment = {'REMIXER_T5X_CACHE': str(tmp_path), **given}
    compilation_cache.enable(environment)
    assert environment == {'REMIXER_T5X_CACHE': str(tmp_path), **given}
    assert not list(tmp_path.iterdir())


def test_a_cache_folder_that_cannot_be_made_is_left_alone(tmp_path):
    (tmp_path / 'file').write_text('')
    environment = {'REMIXER_T5X_CACHE': str(tmp_path / 'file')}
    compilation_cache.enable(environment)
    assert environment == {'REMIXER_T5X_CACHE': str(tmp_path / 'file')}


_PROGRAM = """
import os
from remixer_t5x.devices import compilation_cache
compilation_cache.LEAST_SECONDS = 0
compilation_cache.enable()
import jax, jax.numpy as jnp
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))
print('/jax/compilation_cache/cache_hits' in found)
"""


def test_jax_keeps_programs_there_and_reads_them_in_the_next_process(tmp_path):
    environment = {**os.environ, 'REMIXER_T5X_CACHE': str(tmp_path), 'JAX_PLATFORMS': 'cpu'}
    for name in [name for name in environment if 'COMPILATION_CACHE' in name or 'PERSISTENT_CACHE' in name]:
        del environment[name]
    run = [sys.executable, '-c', _PROGRAM]
    said = [subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert said == ['False\n', 'True\n']
