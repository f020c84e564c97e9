"""A server process for the training runs of `tiny_training.py`, and that file as a module."""

import json
import os
import pathlib
import runpy
import subprocess
import sys
import types

import pytest

SCRIPT = pathlib.Path(__file__).with_name('tiny_training.py')
ROOT = SCRIPT.parents[2]


class TrainingServer:
    """Runs of `tiny_training.run`, each in a process of its own."""

    def __init__(self, folder, devices=1):
        self._folder = folder
        self._number = 0
        flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={devices}'
        env = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags.strip()}
        env['TF_CPP_MIN_LOG_LEVEL'] = '3'
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), '--serve'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            stderr=subprocess.DEVNULL,
        )

    def start(self, **settings):
        """Starts a run; returns its process id and the file that gets its output."""
        self._number += 1
        output = self._folder / f'output{self._number}.txt'
        self._process.stdin.write(json.dumps({**settings, 'output': str(output)}) + '\n')
        self._process.stdin.flush()
        return int(self._process.stdout.readline().split()[1]), output

    def wait(self):
        """The exit code of the run started last; negative is a signal."""
        return int(self._process.stdout.readline().split()[1])

    def run(self, **settings):
        """The exit code and the output of a whole run."""
        output = self.start(**settings)[1]
        return self.wait(), output.read_text()

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


@pytest.fixture(scope='session')
def training(tmp_path_factory):
    server = TrainingServer(tmp_path_factory.mktemp('training'))
    yield server
    server.close()


@pytest.fixture(scope='session')
def training_on_8_devices(tmp_path_factory):
    server = TrainingServer(tmp_path_factory.mktemp('training8'), devices=8)
    yield server
    server.close()


@pytest.fixture(scope='session')
def tiny():
    """`tiny_training.py` as a module."""
    return types.SimpleNamespace(**runpy.run_path(str(SCRIPT)))
