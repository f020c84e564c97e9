"""Python processes that do work next to this one: the Python of one process uses one core.

They are started as new programs, because a copy of a process (a fork) hangs where its libraries have threads, and they
load neither TensorFlow nor JAX. They end within a second of this process, also if it is killed.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from remixer_t5x.errors import UserError

# A function of a module and its arguments. It gives results one by one, and all of it can be pickled.
Job = tuple[Callable[..., Iterator[Any]], tuple[Any, ...]]
# Results of one job that wait until the jobs before it are read.
_WAITING = 16
_START = 'import sys; sys.path[:] = {path!r}; from remixer_tasks.files import workers; workers.main({parent})'


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


class Workers:
    """`count` processes, each started when it is needed. Use it as a context manager, in any number of threads."""

    def __init__(self, count: int):
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        self._closed = False
        for _ in range(count):
            self._idle.put(None)

    def results(self, function: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
        """What `function` gives in one of the processes; waits for a process.

        Raises UserError where the function does, or its process was killed; RuntimeError for another fault.
        """
        process = self._idle.get() or self._start()
        try:
            yield from _results(process, function, arguments)
        except BaseException:
            process.kill()
            self._idle.put(None)
            raise
        self._idle.put(process)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise RuntimeError('these workers are closed')
        code = _START.format(path=sys.path, parent=os.getpid())
        process = subprocess.Popen([sys.executable, '-P', '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._all.append(process)
        return process

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


def _results(process: Any, function: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]) -> Iterator[Any]:
    try:
        pickle.dump((function, arguments), process.stdin)
        process.stdin.flush()
        while True:
            kind, value = pickle.load(process.stdout)
            if kind == 'result':
                yield value
            elif kind == 'end':
                return
            elif kind == 'user error':
                raise UserError(value)
            else:
                raise RuntimeError(f'a worker failed:\n{value}')
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        raise UserError(
            f'a process that reads data ended with exit code {process.wait()}; if the machine ran out of memory, give '
            'it more, or fewer cores'
        ) from error


def in_order(jobs: Sequence[Job], count: int) -> Iterator[Any]:
    """The results of all jobs, job by job, while `count` processes work on the next jobs. Raises as `results` does."""
    stop = threading.Event()
    waiting: collections.deque[queue.Queue[Any]] = collections.deque()
    with Workers(count) as workers, ThreadPoolExecutor(count) as threads:
        try:
            for job in jobs:
                waiting.append(queue.Queue(_WAITING))
                threads.submit(_fill, workers, job, waiting[-1], stop)
                if len(waiting) > count:
                    yield from _drain(waiting.popleft())
            while waiting:
                yield from _drain(waiting.popleft())
        finally:
            stop.set()


def _fill(workers: Workers, job: Job, place: queue.Queue[Any], stop: threading.Event) -> None:
    def put(item: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return place.put(item, timeout=0.1)

    try:
        for result in workers.results(job[0], *job[1]):
            put((result, None))
            if stop.is_set():
                return
        put((None, StopIteration()))
    except BaseException as error:
        put((None, error))


def _drain(place: queue.Queue[Any]) -> Iterator[Any]:
    while True:
        result, error = place.get()
        if isinstance(error, StopIteration):
            return
        if error is not None:
            raise error
        yield result


def main(parent: int) -> None:
    """Runs a worker of the process `parent`: jobs come by standard input, results go to standard output."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    results = os.fdopen(os.dup(1), 'wb')
    # What a library prints must not get among the results.
    os.dup2(2, 1)
    jobs = sys.stdin.buffer
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            function, arguments = pickle.load(jobs)
            for message in _messages(function, arguments):
                pickle.dump(message, results, pickle.HIGHEST_PROTOCOL)
                results.flush()


def _end_with(parent: int) -> None:
    # A broken pipe is noticed only at the next result, which may be hours away.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def _messages(function: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    try:
        for value in function(*arguments):
            yield 'result', value
        yield 'end', None
    except UserError as error:
        yield 'user error', str(error)
    except Exception:
        yield 'fault', traceback.format_exc()
