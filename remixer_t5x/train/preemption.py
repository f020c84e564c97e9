"""Handles SIGTERM, Ctrl-C and SIGHUP: finishes the current step and saves; a second signal exits immediately.

A closing terminal may send SIGHUP twice, from the shell and from the kernel: the second is ignored.
"""

import contextlib
import math
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that make a run save and stop, without SIGHUP if it is ignored, as under nohup."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


class StopRequest:
    """A context manager with handlers of the signals, for a loop from `step` that calls `agreed` after every step."""

    def __init__(self, step: int = 0) -> None:
        self._name: str | None = None
        self._step = step
        self._before: dict[int, Any] = {}

    def __enter__(self) -> 'StopRequest':
        if threading.current_thread() is threading.main_thread():
            # With several processes JAX's service handles SIGTERM and notifies the other processes.
            numbers = [number for number in stop_signals() if jax.process_count() == 1 or number != signal.SIGTERM]
            self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._name is not None and number == signal.SIGHUP:
            return
        if self._name is not None:
            _print('ends without saving')
            os._exit(128 + number)
        self._name = signal.Signals(number).name
        again = 'press again' if number == signal.SIGINT else 'send it again'
        _print(f'{self._name}: finishing step {self._step + 1}, then saving; {again} to quit without saving')
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self, step: int) -> str | None:
        """Returns the signal's name if every process stops after `step`, otherwise None; all processes call this."""
        self._step = step
        if jax.process_count() == 1:
            return self._name
        return 'SIGTERM' if multihost_utils.reached_preemption_sync_point(step) else None


def time_to_save(state: Any, seconds: float, notice: float) -> str:
    """Describes whether a run can save within `notice` seconds after SIGTERM.

    `state` is a tree of arrays or their shapes, and `seconds` the time of the last write until the checkpoint was
    complete.
    """
    mebibytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / 2**20
    speed = mebibytes / max(seconds, 1e-3)
    digits = 2 if speed < 1 else 0
    write = f'a checkpoint of {mebibytes:,.1f} MiB takes {seconds:.1f} s to write ({speed:,.{digits}f} MiB/s)'
    notice_text = f'{notice:g} s of notice before a preemption (PREEMPTION_NOTICE)'
    if seconds > notice:
        return (
            f'{write}: {notice_text} are too short to save, and a preempted run goes back to its last checkpoint; '
            'lower CHECKPOINT_PERIOD'
        )
    if 2 * seconds > notice:
        return f'{write}: {notice_text} are enough to save, unless another checkpoint is being written just then'
    return f'{write}: {notice_text} are enough to save'


def _print(text: str) -> None:
    # A handler may interrupt a print, whose buffer is not reentrant.
    with contextlib.suppress(OSError):
        os.write(2, f'\n{text}\n'.encode())
