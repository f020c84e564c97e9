"""The start of a command: the compilation cache, and compilation before TensorFlow is imported."""

import subprocess
import sys

import pytest

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
        # Set and then deleted, so that monkeypatch also undoes changes by the command.
        monkeypatch.setenv(name, '')
        monkeypatch.delenv(name)
    monkeypatch.setenv('REMIXER_T5X_CACHE', str(tmp_path))


def test_a_command_keeps_compiled_programs(tmp_path, capsys):
    assert main.main(['info', '--gin_file=no_such_file.gin']) == 2
    assert (tmp_path / 'compiled' / compilation_cache.get_machine_name()).is_dir()


_TRAIN = """
import sys, threading
from remixer_t5x.cli import main
from remixer_t5x.devices import compilation_cache, compiler_options
from remixer_t5x.errors import UserError
from remixer_t5x.train import run_setup

def prepare(*_, **__):
    raise UserError(f'compiles: {compilation_cache.is_compiling()}, TensorFlow: {"tensorflow" in sys.modules}')

run_setup.RunData = prepare
# The compilation never ends.
compiler_options.compile_with_options = lambda *_: threading.Event().wait()
sys.exit(main.main())
"""


def test_the_step_compiles_before_tensorflow_is_imported(tmp_path):
    layers = [f'--gin.NUM_{side}_LAYERS=1' for side in ('ENCODER', 'DECODER')]
    flags = ['--gin_file=experiments/python_docs.gin', f'--gin.MODEL_DIR={tmp_path / "run"}', *layers]
    done = subprocess.run([sys.executable, '-c', _TRAIN, 'train', *flags], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (2, 'error: compiles: True, TensorFlow: False\n')
    assert not (tmp_path / 'run').exists()
