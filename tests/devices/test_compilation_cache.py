"""Where compiled programs are kept, and who decides it."""

import os
import signal
import subprocess
import sys

import filelock
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


# Written by a process that the kernel kills at this size of a file.
_TORN_BYTES = 200
_KILLED_WHILE_WRITING = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, ({_TORN_BYTES}, {_TORN_BYTES}))
"""
_PROGRAM = """
from remixer_t5x.devices import compilation_cache
compilation_cache.LEAST_SECONDS = 0
compilation_cache.enable()
import jax, jax.numpy as jnp
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event))
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((8, 8)))
print('/jax/compilation_cache/cache_hits' in found)
"""


def _run(program, cache):
    environment = {**os.environ, 'REMIXER_T5X_CACHE': str(cache), 'JAX_PLATFORMS': 'cpu'}
    for name in [name for name in environment if 'COMPILATION_CACHE' in name or 'PERSISTENT_CACHE' in name]:
        del environment[name]
    return subprocess.run([sys.executable, '-c', program], env=environment, capture_output=True, text=True)


def test_jax_reads_programs_of_other_processes_and_replaces_torn_ones(tmp_path):
    killed = _run(_KILLED_WHILE_WRITING + _PROGRAM, tmp_path)
    (torn,) = tmp_path.glob('compiled/*/*-cache')
    assert (killed.returncode, torn.stat().st_size) == (-signal.SIGXFSZ, _TORN_BYTES)
    runs = [_run(_PROGRAM, tmp_path) for _ in range(2)]
    assert [run.stdout for run in runs] == ['False\n', 'True\n'], [run.stderr for run in runs]
    assert torn.stat().st_size > _TORN_BYTES


def test_a_process_that_is_writing_an_entry_keeps_it(tmp_path):
    folder = tmp_path / 'compiled' / compilation_cache.machine()
    folder.mkdir(parents=True)
    entry = folder / 'program-cache'
    entry.write_bytes(b'first half')
    with filelock.FileLock(folder / '.lockfile'):
        compilation_cache.enable({'REMIXER_T5X_CACHE': str(tmp_path)})
        assert entry.exists()
    compilation_cache.enable({'REMIXER_T5X_CACHE': str(tmp_path)})
    assert not entry.exists()


def test_entries_of_a_cache_without_a_limit_stay(tmp_path):
    folder = tmp_path / 'compiled' / compilation_cache.machine()
    folder.mkdir(parents=True)
    entry = folder / 'program-cache'
    entry.write_bytes(b'whole')
    compilation_cache.enable({'REMIXER_T5X_CACHE': str(tmp_path), 'JAX_COMPILATION_CACHE_MAX_SIZE': '-1'})
    assert entry.exists()
