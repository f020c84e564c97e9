"""Measures what a command does until its first result; `--verbose` prints it.

Seconds of the wall clock, and of all processor cores in parentheses. A phase starts at the end of the previous phase.
"""

import threading
import time
from collections.abc import Callable

# The name of threads in which XLA compiles, which cannot be interrupted.
COMPILES = 'compile'
# The name of each phase, and both clocks at its end. The first entry is the start of the command.
_marks: list[tuple[str, float, float]] = []


def start_timer() -> None:
    """Starts to measure; without it the other functions do nothing."""
    _marks[:] = [('', time.perf_counter() - time.process_time(), 0.0)]


def is_measuring() -> bool:
    """Returns whether `--verbose` asks for the time of the start."""
    return bool(_marks)


def end_phase(phase: str) -> None:
    """Ends a phase and gives it a name."""
    if _marks:
        _marks.append((phase, time.perf_counter(), time.process_time()))


def is_compiling() -> bool:
    """Returns whether XLA compiles in a thread."""
    return any(thread.name == COMPILES for thread in threading.enumerate())


def report_phases(write: Callable[[str], None]) -> None:
    """Prints the phases once, in one line."""
    if len(_marks) > 1:
        pairs = zip(_marks, _marks[1:], strict=False)
        parts = [f'{name} {wall - before:.1f} s ({cpu - used:.1f})' for (_, before, used), (name, wall, cpu) in pairs]
        total, used = _marks[-1][1] - _marks[0][1], _marks[-1][2]
        write(f'start-up {total:.1f} s ({used:.1f} of processor time): {" · ".join(parts)}')
    _marks.clear()
