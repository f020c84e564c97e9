"""Handles SIGTERM, Ctrl-C and SIGHUP: the run finishes the current step and saves a checkpoint.

A second signal ends the process immediately. A second SIGHUP is ignored, because both the shell and the kernel may send
SIGHUP when a terminal is closed.
"""

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


def get_stop_signals() -> list[signal.Signals]:
    """Returns the signals that make a run save and stop. Omits SIGHUP if it is already ignored, as under nohup."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


class StopSignalHandler:
    """Installs signal handlers for `get_stop_signals`.

    `step` is the step at which the training loop starts. The loop must call `get_agreed_signal` after every step.
    """

    def __init__(self, step: int = 0) -> None:
        self._name: str | None = None
        self._step = step
        self._before: dict[int, Any] = {}

    def __enter__(self) -> 'StopSignalHandler':
        if threading.current_thread() is threading.main_thread():
            # With several processes, JAX's preemption service handles SIGTERM and notifies the other processes.
            numbers = [number for number in get_stop_signals() if jax.process_count() == 1 or number != signal.SIGTERM]
            self._before = {number: signal.signal(number, self._handle_signal) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if self._name is not None and number == signal.SIGHUP:
            return
        if self._name is not None:
            _print_in_signal_handler('exiting without saving')
            os._exit(128 + number)
        self._name = signal.Signals(number).name
        again = 'press again' if number == signal.SIGINT else 'send it again'
        _print_in_signal_handler(
            f'{self._name}: finishing step {self._step + 1}, then saving; {again} to quit without saving'
        )
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def get_agreed_signal(self, step: int) -> str | None:
        """Returns the name of the received signal if all processes should stop after `step`, or None.

        All processes must call this method.
        """
        self._step = step
        if jax.process_count() == 1:
            return self._name
        return (self._name or 'SIGTERM') if multihost_utils.reached_preemption_sync_point(step) else None


def _print_in_signal_handler(text: str) -> None:
    # Do not call `print`, because it is not reentrant and the signal may have interrupted it.
    with contextlib.suppress(OSError):
        os.write(2, f'\n{text}\n'.encode())
