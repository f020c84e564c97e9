"""A process that has imported the libraries once and forks a training run of `tiny_training.py` for each request."""

import json
import os
import subprocess
import sys

from tests.support import paths


class TrainingServer:
    """Runs of `tiny_training.run`, each in a process of its own."""

    def __init__(self, folder, devices=1):
        self._folder = folder
        self._number = 0
        flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={devices}'
        self._process = subprocess.Popen(
            [sys.executable, '-m', 'tests.support.tiny_training', '--serve'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=paths.environment(XLA_FLAGS=flags.strip()),
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
