"""Runs a function in parallel Python processes.

A separate Python process forks the workers. Forks of this process could hang, because TensorFlow and JAX start threads;
the spawn method of `multiprocessing` would run the user's main module again. The workers end when this process ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle  # noqa: TID251 (pipes to processes that this process started)
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from remixer_t5x.errors import UserError

_START = 'import sys; sys.path[:] = {path!r}; from remixer_tasks.files import workers; workers.main()'
_KILLED = 'a process that parses data was killed; if memory ran out, use fewer cores (taskset)'


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def map_in_order(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], count: int) -> Iterator[Any]:
    """Computes `function(*job)` in `count` processes and yields the results in the order of `jobs`.

    A UserError in `function` is raised again, a killed process raises UserError, and other errors raise RuntimeError.
    """
    command = [sys.executable, '-P', '-c', _START.format(path=sys.path)]
    # Workers run in a new session, so that Ctrl-C interrupts only this process, which then kills the workers.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdin and process.stdout
    try:
        pickle.dump((function, jobs, count), process.stdin)
        process.stdin.flush()
        for _ in jobs:
            error, result = pickle.load(process.stdout)
            if error is not None:
                raise error(result)
            yield result
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as broken:
        raise UserError(_KILLED) from broken
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stdin.close()


def main() -> None:
    """Runs jobs from standard input and writes their results to standard output."""
    results = os.fdopen(os.dup(1), 'wb', 0)
    # Redirects standard output to standard error, so that libraries cannot print between the results.
    os.dup2(2, 1)
    function, jobs, count = pickle.load(sys.stdin.buffer)
    with ProcessPoolExecutor(min(count, len(jobs)), multiprocessing.get_context('fork')) as pool:
        finished = pool.map(function, *zip(*jobs, strict=True))
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        try:
            for result in finished:
                results.write(pickle.dumps((None, result)))
        except BrokenProcessPool:
            results.write(pickle.dumps((UserError, _KILLED)))
        except UserError as error:
            results.write(pickle.dumps((UserError, str(error))))
        except Exception:
            results.write(pickle.dumps((RuntimeError, f'a worker failed:\n{traceback.format_exc()}')))


def _exit_with_parent() -> None:
    # The pipe closes when the parent process ends, even if the parent is killed.
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)
