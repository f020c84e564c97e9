"""Starts real processes, which tests can kill. They are forked from a server that has imported the libraries.

Importing TensorFlow, JAX, Orbax and remixer_t5x takes about 8 seconds; forking the server takes 0.05 seconds. The
server is the forkserver of `multiprocessing`: one for each pytest process, which starts with its first child.
"""

import ctypes
import multiprocessing
import os
import pathlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from typing import Any
from unittest import mock

import jax

from tests.support import paths

# The module that the server imports.
PRELOADED_MODULE = 'tests.support.preloaded_modules'
# Default timeout in seconds: much longer than four commands of one process take on a busy machine.
TIMEOUT = 1200.0
_CONTEXT = multiprocessing.get_context('forkserver')
_PR_SET_PDEATHSIG = 1


class Process:
    """A process that calls `function(*arguments)` and writes its output to a file.

    The exit code is the return value of the function (0 for None), 1 after an exception, or negative for a signal.

    Args:
        function: a function at module level, so that it can be pickled.
        arguments: arguments of the function, which must be picklable.
        output: the file for standard output and standard error.
        devices: number of virtual CPU devices.
        environment: all environment variables (default: those of `paths.environment`).
        folder: the working directory (default: that of this process).
        file_size: the maximum file size in bytes; larger writes fail as on a full disk.
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        *arguments: Any,
        output: pathlib.Path,
        devices: int = 1,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        file_size: int | None = None,
    ):
        self.log = pathlib.Path(output)
        variables = dict(environment or paths.environment())
        _start_server(paths.environment())
        settings = (PRELOADED_MODULE, str(self.log), folder or os.getcwd(), variables, devices, file_size)
        self._process = _CONTEXT.Process(target=_run_child, args=(*settings, function, *arguments), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Sends a signal unless the process has ended."""
        if self.running:
            os.kill(self.pid, number)

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Returns the exit code. After the timeout, kills the process and raises AssertionError with its output."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise AssertionError(f'still running after {timeout:.0f} s\n{self.output()}')
        return self._process.exitcode

    def kill(self) -> int:
        """Kills the process unless it has ended, and returns the exit code."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode

    def wait_until(self, condition: Callable[[], bool], event: str = 'the condition was true') -> None:
        """Waits until `condition()` is true. Raises AssertionError with the output if the process ends before."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            ended = not self.running
            # Checks the condition again, because it may have become true just before the process ended.
            if ended and condition():
                return
            if ended or time.monotonic() > deadline:
                reason = f'the process ended with {self._process.exitcode}' if ended else f'{TIMEOUT:.0f} s passed'
                self.kill()
                raise AssertionError(f'{reason} before {event}\n{self.output()}')
            time.sleep(0.005)

    def output(self) -> str:
        return self.log.read_text(errors='replace') if self.log.exists() else ''


def _run_child(
    preloaded: str,
    log: str,
    folder: str,
    environment: dict[str, str],
    devices: int,
    file_size: int | None,
    function: Callable[..., int | None],
    *arguments: Any,
) -> None:
    """Calls the function in a forked process, and exits. See `Process` for the arguments."""
    _exit_with_server()
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        if file_size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        if devices > 1:
            jax.config.update('jax_num_cpu_devices', devices)
        if preloaded not in sys.modules:
            raise ImportError(f'the server has not imported {preloaded}')
        code = function(*arguments) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_with_server() -> None:
    """Makes the kernel kill this process when the server exits.

    The server exits when its parent has closed the other end of a pipe. This process inherits that end, and closes it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)


def _start_server(environment: Mapping[str, str]) -> None:
    """Starts the server, unless it is running, with an environment in which it can import this checkout."""
    with mock.patch.dict(os.environ, environment):
        forkserver.set_forkserver_preload([PRELOADED_MODULE])
        forkserver.ensure_running()
