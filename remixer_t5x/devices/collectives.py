"""Messages between the processes of a run, outside of computations: failures, and decisions of the first process.

Messages go through the key-value store of JAX's coordination service and do not use devices, so they also reach a
process that waits in a collective operation for a process that will never come.
"""

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax

from remixer_t5x.devices.jax_workarounds import coordination
from remixer_t5x.errors import UserError, one_line

_FAILED = 'remixer_t5x/failed'
_POLL_SECONDS = 1.0
_EXIT_SECONDS = 5.0
# Words in the errors of connections between processes.
_CONNECTIONS = ('Gloo', 'NCCL', 'UNAVAILABLE', 'coordination')
# All processes call these functions in the same order, so a number identifies a call.
_calls = itertools.count()


def is_distributed() -> bool:
    """Returns whether the run has several processes. Does not start JAX's devices."""
    return jax.distributed.is_initialized()


def broadcast(value: Any) -> Any:
    """Returns the first process's `value` (JSON) on every process. All processes call this in the same order.

    Use it for facts that each process could see differently, such as which checkpoint is the newest.
    """
    if not is_distributed():
        return value
    key = f'remixer_t5x/{next(_calls)}'
    if coordination().process_id == 0:
        coordination().client.key_value_set(key, json.dumps(value))
        return value
    return _get(key)


def check_same(values: Mapping[str, Any]) -> None:
    """Raises UserError on every process if a value (JSON) of any process differs from the first process's.

    The error names the first difference, in the order of `values`. All processes call this in the same order, before
    they do work that assumes equal values: otherwise they would compute different numbers, or wait for each other.
    """
    if not is_distributed():
        return
    key, difference, index = f'remixer_t5x/{next(_calls)}', '', coordination().process_id
    if index:
        coordination().client.key_value_set(f'{key}/{index}', json.dumps(values))
    else:
        first = json.loads(json.dumps(values))
        for other in range(1, coordination().num_processes):
            difference = difference or _difference(first, _get(f'{key}/{other}'), f'process {other}')
    if difference := broadcast(difference):
        raise UserError(difference)


def barrier() -> None:
    """Returns once every process has called it equally often."""
    if is_distributed():
        # An hour means no limit: the heartbeat ends all processes if one is lost.
        coordination().client.wait_at_barrier(f'remixer_t5x/{next(_calls)}', 3_600_000)


def _get(key: str) -> Any:
    while True:
        try:
            return json.loads(coordination().client.blocking_key_value_get(key, 10_000))
        except jax.errors.JaxRuntimeError as error:
            # The other process may be slow; if it is lost, the heartbeat ends this process.
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], process: str) -> str:
    for name in {**first, **other}:
        values = [str(side.get(name, 'absent')) for side in (first, other)]
        if values[0] != values[1]:
            # Long values are shown from shortly before their first difference on.
            start = max(0, len(os.path.commonprefix(values)) - 40)
            here, there = (value[start : start + 120] for value in values)
            return (
                f'{name} must be the same in all processes of a run, got {here} in process 0 and {there} in '
                f'{process}; start all processes with the same command, code and data'
            )
    return ''


class FailureWatcher:
    """Ends this process, with one line on standard error, if another process reports a failure.

    A process that is killed or stops answering cannot report one: JAX itself then aborts all others within the
    heartbeat timeout (SIGABRT, exit code 134).

    Args:
        name: name of this process in messages.
        heartbeat_timeout: seconds, as passed to `jax.distributed.initialize`.
    """

    def __init__(self, name: str, heartbeat_timeout: float):
        self._name, self._timeout = name, heartbeat_timeout
        self._closed = threading.Event()

    def start(self) -> None:
        """Starts the thread that looks for failures; call it once the process is connected."""
        threading.Thread(target=self._poll, name='peers', daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def failed(self, code: int, text: str) -> None:
        """Tells the other processes that this process exits with `code`, and why. Waits at most 5 s for them."""
        self.close()
        record = {'process': coordination().process_id, 'code': code, 'text': text}
        # Another process has reported first, or the coordinator is lost.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            coordination().client.key_value_set(_FAILED, json.dumps(record))
        self._exit_barrier()

    def wait_for_reason(self, error: BaseException) -> None:
        """If `error` is of a connection between processes, waits until the failed process is reported.

        The neighbours of a lost process see a broken connection before any process knows why.
        """
        if isinstance(error, jax.errors.JaxRuntimeError | ValueError) and any(
            name in str(error) for name in _CONNECTIONS
        ):
            self._closed.wait(self._timeout + _POLL_SECONDS)

    def _poll(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            try:
                record = json.loads(coordination().client.key_value_try_get(_FAILED))
            except (jax.errors.JaxRuntimeError, AttributeError):
                continue
            if self._closed.is_set():
                return
            line = one_line(f'error ({self._name}): process {record["process"]} has failed: {record["text"]}')
            # The stuck thread may hold the lock of Python's own stream.
            with contextlib.suppress(OSError):
                os.write(2, f'{line}\n'.encode())
            self._exit_barrier()
            exit_process(record['code'])

    def _exit_barrier(self) -> None:
        """Waits for all processes; the first exits last, because it holds the messages for the others."""
        try:
            coordination().client.wait_at_barrier(_FAILED, int(1000 * _EXIT_SECONDS))
        except jax.errors.JaxRuntimeError:
            return
        if coordination().process_id == 0:
            time.sleep(0.5)


def exit_process(code: int) -> None:
    """Exits at once: a normal exit would wait for the other processes at a barrier."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)
