"""Measures the duration of each phase of a command's start-up for `--verbose`.

Prints each phase's wall time in seconds, followed by its CPU time in parentheses. A phase starts when the previous one
ends.
"""

import threading
import time
from collections.abc import Callable

# Name of the threads that run XLA's compiler, which cannot be interrupted.
COMPILE_THREAD_NAME = 'compile'
# A tuple (phase, wall time, CPU time) for the end of each phase. The first tuple marks the start of the command.
_marks: list[tuple[str, float, float]] = []


def start_timer() -> None:
    """Starts measuring. The other functions of this module do nothing unless this function has been called."""
    _marks[:] = [('', time.perf_counter() - time.process_time(), 0.0)]


def end_phase(phase: str) -> None:
    """Records that the phase named `phase` has ended."""
    if _marks:
        _marks.append((phase, time.perf_counter(), time.process_time()))


def is_compiling() -> bool:
    """Returns whether a thread is running XLA's compiler."""
    return any(thread.name.startswith(COMPILE_THREAD_NAME) for thread in threading.enumerate())


def report_phases(write: Callable[[str], None]) -> None:
    """Prints all phases in one line, and stops measuring."""
    if len(_marks) > 1:
        pairs = zip(_marks, _marks[1:], strict=False)
        parts = [f'{name} {wall - before:.1f} s ({cpu - used:.1f})' for (_, before, used), (name, wall, cpu) in pairs]
        total, used = _marks[-1][1] - _marks[0][1], _marks[-1][2]
        write(f'start-up {total:.1f} s ({used:.1f} of processor time): {" · ".join(parts)}')
    _marks.clear()
