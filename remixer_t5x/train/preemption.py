"""Handles SIGTERM, Ctrl-C and SIGHUP: finishes the current step and saves; a second signal exits immediately.

A closing terminal may send SIGHUP twice, from the shell and from the kernel: the second is ignored.
"""

import contextlib
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


def _print(text: str) -> None:
    # A handler may interrupt a print, whose buffer is not reentrant.
    with contextlib.suppress(OSError):
        os.write(2, f'\n{text}\n'.encode())
