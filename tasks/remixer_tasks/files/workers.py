"""Runs a function in other Python processes, because the Python of one process uses one core.

They are started as new programs: a fork of a process with threads may hang, and `multiprocessing` would run the user's
main module again. They load neither TensorFlow nor JAX, and end within a second of this process, even if it is killed.
"""

from __future__ import annotations

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

_START = 'import sys; sys.path[:] = {path!r}; from remixer_tasks.files import workers; workers.main({parent})'


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def in_order(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], count: int) -> Iterator[Any]:
    """The results of `function(*job)` in the order of the jobs, computed by `count` processes.

    Function, arguments and results are pickled. Raises UserError where the function does, or if its process is killed,
    and RuntimeError for any other error.
    """
    code = _START.format(path=sys.path, parent=os.getpid())
    processes = [
        subprocess.Popen([sys.executable, '-P', '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(min(count, len(jobs)))
    ]
    idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def call(job: tuple[Any, ...]) -> Any:
        process = idle.get()
        try:
            pickle.dump((function, job), process.stdin)
            process.stdin.flush()
            error, result = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as broken:
            raise UserError(
                f'a process that reads data ended with exit code {process.wait()}; if the machine ran out of memory, '
                'give it more, or fewer cores'
            ) from broken
        finally:
            idle.put(process)
        if error is not None:
            raise error(result)
        return result

    with ThreadPoolExecutor(max(len(processes), 1)) as threads:
        try:
            yield from threads.map(call, jobs)
        finally:
            for process in processes:
                # A job that runs ends with its process, so that no thread waits for it.
                process.kill()
                process.wait()
            threads.shutdown(cancel_futures=True)
            for process in processes:
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):
                        pipe.close()  # type: ignore[union-attr]


def main(parent: int) -> None:
    """Runs a worker of the process `parent`: jobs come by standard input, results go to standard output."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    results = os.fdopen(os.dup(1), 'wb')
    # What a library prints must not get among the results.
    os.dup2(2, 1)
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            function, arguments = pickle.load(sys.stdin.buffer)
            pickle.dump(_result(function, arguments), results)
            results.flush()


def _end_with(parent: int) -> None:
    # A broken pipe is noticed only at the next result, which may be hours away.
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def _result(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[type[Exception] | None, Any]:
    try:
        return None, function(*arguments)
    except UserError as error:
        return UserError, str(error)
    except Exception:
        return RuntimeError, f'a worker failed:\n{traceback.format_exc()}'
