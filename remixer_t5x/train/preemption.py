"""Handles SIGTERM, Ctrl-C and SIGHUP: the run finishes the current step or evaluation batch, and saves a checkpoint.

A second signal ends the process immediately. Signals within REPEAT_SECONDS of the first are ignored, because Ctrl-C,
Slurm and systemd signal all processes of a job, and a launcher forwards the signal to its run again. A second SIGHUP is
always ignored, because both the shell and the kernel may send SIGHUP when a terminal is closed.
"""

import contextlib
import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

REPEAT_SECONDS = 1.0


def get_stop_signals() -> list[signal.Signals]:
    """Returns the signals that make a run save and stop. Omits SIGHUP if it is already ignored, as under nohup."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


class EvaluationInterrupted(Exception):
    """Raised if a signal stops the run during an evaluation."""


class StopSignalHandler:
    """Installs signal handlers for `get_stop_signals`.

    The training loop must call `get_agreed_signal` after every step, and evaluations must call `raise_if_stopping`
    before every batch.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._first_signal_time = 0.0
        self._num_calls, self._is_agreed = 0, False
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
        if self._name is not None:
            if number == signal.SIGHUP or time.monotonic() - self._first_signal_time < REPEAT_SECONDS:
                return
            _print_in_signal_handler('exiting without saving')
            os._exit(128 + number)
        self._name, self._first_signal_time = signal.Signals(number).name, time.monotonic()
        again = 'press again' if number == signal.SIGINT else 'send it again'
        _print_in_signal_handler(
            f'{self._name}: finishing this step or evaluation batch, then saving; {again} to quit without saving'
        )
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def get_agreed_signal(self) -> str | None:
        """Returns the name of the received signal if all processes should stop now, or None.

        All processes must call this method and `raise_if_stopping` in the same order.
        """
        if jax.process_count() == 1:
            return self._name
        self._num_calls += 1
        self._is_agreed |= multihost_utils.reached_preemption_sync_point(self._num_calls)
        return (self._name or 'SIGTERM') if self._is_agreed else None

    def raise_if_stopping(self) -> None:
        """Raises EvaluationInterrupted if all processes should stop now."""
        if self.get_agreed_signal():
            raise EvaluationInterrupted


def _print_in_signal_handler(text: str) -> None:
    # Do not call `print`, because it is not reentrant and the signal may have interrupted it.
    with contextlib.suppress(OSError):
        os.write(2, f'\n{text}\n'.encode())
