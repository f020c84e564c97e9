"""Tests of the helpers that start, wait for and kill real processes."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.support import paths, ports


def wait_until(condition):
    """Waits for another process, for at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


START_CHILD_AND_WAIT = """
import pathlib, signal, sys, time
from tests.support import real_processes
real_processes.PRELOADED_MODULE = 'json'  # the default module takes seconds to import
print(real_processes.Process(time.sleep, 600, output=pathlib.Path(sys.argv[1])).pid, flush=True)
signal.pause()
"""


def test_no_process_outlives_a_killed_test_run(tmp_path):
    """The process is suspended, so that it cannot exit by itself."""
    command = [sys.executable, '-c', START_CHILD_AND_WAIT, str(tmp_path / 'output.txt')]
    with subprocess.Popen(command, env=paths.environment(), stdout=subprocess.PIPE, text=True) as run:
        child = psutil.Process(int(run.stdout.readline()))
        # The child opens its output after it has arranged to be killed with its server.
        wait_until((tmp_path / 'output.txt').exists)
        os.kill(child.pid, signal.SIGSTOP)
        run.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_warm_python_behaves_like_python(warm_python, tmp_path):
    code = 'import sys\nprint(sys.argv[1:])\nsys.exit(3)'
    done = subprocess.run([*warm_python.command, '-', 'a'], input=code, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "['a']\n")


def test_a_reserved_port_is_only_available_to_its_owner():
    port = ports.reserve()
    with socket.socket() as other, pytest.raises(OSError, match='in use'):
        other.bind(('127.0.0.1', port))
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        owner.bind(('', port))
        owner.listen()
