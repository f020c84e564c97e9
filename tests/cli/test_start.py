"""What every command does first: it turns the cache of compiled programs on, and measures its start if asked."""

import pytest

from remixer_t5x import startup
from remixer_t5x.cli import main
from remixer_t5x.devices import compilation_cache

VARIABLES = (
    'JAX_COMPILATION_CACHE_DIR',
    'JAX_ENABLE_COMPILATION_CACHE',
    'JAX_COMPILATION_CACHE_MAX_SIZE',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS',
)


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in VARIABLES:
        # Set and deleted, so that what the command sets is deleted afterwards.
        monkeypatch.setenv(name, '')
        monkeypatch.delenv(name)
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path))


def test_a_command_keeps_compiled_programs(tmp_path, capsys):
    assert main.main(['info', '--gin_file=no_such_file.gin']) == 2
    assert (tmp_path / 'compiled' / compilation_cache.machine()).is_dir()


def test_verbose_measures_the_start(capsys):
    said = []
    assert main.main(['info', '--gin_file=no_such_file.gin', '--verbose']) == 2
    startup.done('flags')
    startup.report(said.append)
    assert len(said) == 1 and 'flags' in said[0]
