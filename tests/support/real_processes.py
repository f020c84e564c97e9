"""Real processes for tests: each is forked from a server that has imported the libraries once, and can be killed.

Importing TensorFlow, JAX, Orbax and our modules takes about 8 seconds, forking a process that has them 0.05. The server
is Python's own (`multiprocessing`'s forkserver), one for each pytest process and started when first asked for.
"""

import ctypes
import dataclasses
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

import jax

from tests.support import kept_programs, paths

# The module that the server imports, with all that runs and commands of tests need.
IMPORTED_ONCE = 'tests.support.imported_once'
# Seconds for anything that a test waits for: far more than four commands of one process take on a busy machine.
PATIENCE = 1200.0
_CONTEXT = multiprocessing.get_context('forkserver')
_PR_SET_PDEATHSIG = 1


class Process:
    """One process that calls `function(*arguments)`, its output in a file.

    Its exit code is what the function returns (None is 0), 1 after an exception, negative for a signal.

    Args:
        function: found by the child by its module and name, so it must be at the top of a module.
        arguments: picklable.
        output: the file that gets standard output and standard error.
        devices: virtual CPU devices that JAX shows.
        environment: all variables; None takes those of `paths.environment`.
        folder: the working directory; None is that of this process.
        compiled: a folder for JAX's compiled programs that other processes read; None compiles everything here.
        file_size: bytes beyond which a write to a file fails, as on a full disk.
        clock_shift: seconds that Python's clock is ahead.
    """

    def __init__(
        self,
        function: Callable[..., int | None],
        *arguments: Any,
        output: pathlib.Path,
        devices: int = 1,
        environment: Mapping[str, str] | None = None,
        folder: str | None = None,
        compiled: pathlib.Path | None = None,
        file_size: int | None = None,
        clock_shift: float = 0.0,
    ):
        self.log = pathlib.Path(output)
        variables = dict(environment or paths.environment())
        programs = None if compiled is None else str(compiled)
        place = _Place(str(self.log), folder or os.getcwd(), variables, devices, programs, file_size, clock_shift)
        _start_server(paths.environment())
        self._process = _CONTEXT.Process(target=_child, args=(IMPORTED_ONCE, place, function, arguments), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def send(self, number: int) -> None:
        """Sends the signal; nothing happens where the process has ended."""
        if self.running:
            os.kill(self.pid, number)

    def wait(self, patience: float = PATIENCE) -> int:
        """The exit code. Raises AssertionError, with the output, where the process runs on; it is killed then."""
        self._process.join(patience)
        if self._process.exitcode is None:
            self.kill()
            raise AssertionError(f'still running after {patience:.0f} s\n{self.output()}')
        return self._process.exitcode

    def kill(self) -> int:
        """The exit code; where the process had ended before, the code of that end."""
        self._process.kill()
        self._process.join()
        return self._process.exitcode

    def until(self, condition: Callable[[], bool], what: str = 'what was waited for') -> None:
        """Returns as soon as `condition()` holds. Raises AssertionError, with the output, where it never will."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = not self.running
            # Once more: the process may have done it as the last thing of all.
            if ended and condition():
                return
            if ended or time.monotonic() > deadline:
                why = f'the process ended with {self._process.exitcode}' if ended else f'{PATIENCE:.0f} s passed'
                self.kill()
                raise AssertionError(f'{why} before {what}\n{self.output()}')
            time.sleep(0.005)

    def output(self) -> str:
        return self.log.read_text(errors='replace') if self.log.exists() else ''


@dataclasses.dataclass(frozen=True)
class _Place:
    """What a child sets up before it calls its function; see `Process`."""

    log: str
    folder: str
    environment: dict[str, str]
    devices: int
    compiled: str | None
    file_size: int | None
    clock_shift: float

    def enter(self) -> None:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        if self.file_size is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_size, self.file_size))
        if self.clock_shift:
            real, nanoseconds = time.time, time.time_ns
            time.time = lambda: real() + self.clock_shift
            time.time_ns = lambda: nanoseconds() + int(1e9 * self.clock_shift)
        if self.devices > 1:
            jax.config.update('jax_num_cpu_devices', self.devices)
        if self.compiled:
            kept_programs.keep(self.compiled)


def _child(imported: str, place: _Place, function: Callable[..., int | None], arguments: tuple[Any, ...]) -> None:
    """The whole life of a process."""
    _end_with_the_server()
    code = 1
    try:
        place.enter()
        if imported not in sys.modules:
            raise ImportError(f'the server has not imported {imported}')
        code = function(*arguments) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with_the_server() -> None:
    """The server ends when the process that started it does, killed or not; this one is killed then, also if stopped.

    The server knows by a pipe of which its children have the other end too, so this child closes that.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)


def _start_server(environment: Mapping[str, str]) -> None:
    """Its imports need the paths of this checkout in its environment; nothing happens where it runs already."""
    own = dict(os.environ)
    os.environ.update(environment)
    try:
        forkserver.set_forkserver_preload([IMPORTED_ONCE])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)
