"""Implements broadcasts, barriers and failure reports between the processes of a run without using devices.

Messages use the key-value store of JAX's coordination service, which remains usable while a device collective waits for
a failed process.
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

from remixer_t5x.devices.jax_workarounds import get_coordination_state
from remixer_t5x.errors import UserError, to_one_line

_FAILURE_KEY = 'remixer_t5x/failed'
_POLL_SECONDS = 1.0
_EXIT_SECONDS = 5.0
# Substrings that identify messages of connection errors.
_CONNECTION_ERRORS = ('Gloo', 'NCCL', 'UNAVAILABLE', 'coordination')
# Exit code after a connection error; JAX aborts with the same code (SIGABRT) if another process is lost.
LOST_CODE = 134
# Counts the calls; the count makes message keys unique. All processes make their calls in the same order.
_call_numbers = itertools.count()


def is_distributed() -> bool:
    """Returns whether the run has several processes. Does not initialize JAX's devices."""
    return jax.distributed.is_initialized()


def broadcast(value: Any) -> Any:
    """Returns the JSON value of process 0 on every process. All processes must call this function in the same order.

    Use `broadcast` for values that may differ between processes, such as the step of the latest checkpoint.
    """
    if not is_distributed():
        return value
    key = f'remixer_t5x/{next(_call_numbers)}'
    if get_coordination_state().process_id == 0:
        get_coordination_state().client.key_value_set(key, json.dumps(value))
        return value
    return _wait_for_value(key)


def check_same_on_processes(values: Mapping[str, Any]) -> None:
    """Raises UserError on every process if any JSON value of `values` differs between processes.

    The error message describes the first difference in the order of `values`. All processes must call this function in
    the same order, before any work that assumes equal values.
    """
    if not is_distributed():
        return
    key, difference, index = f'remixer_t5x/{next(_call_numbers)}', '', get_coordination_state().process_id
    if index:
        get_coordination_state().client.key_value_set(f'{key}/{index}', json.dumps(values))
    else:
        first = json.loads(json.dumps(values))
        for other in range(1, get_coordination_state().num_processes):
            difference = difference or _describe_difference(
                first, _wait_for_value(f'{key}/{other}'), f'process {other}'
            )
    if difference := broadcast(difference):
        raise UserError(difference)


def barrier() -> None:
    """Waits until all processes have called this function."""
    if is_distributed():
        # One hour is effectively no timeout, because missing heartbeats end all processes if a process is lost.
        get_coordination_state().client.wait_at_barrier(f'remixer_t5x/{next(_call_numbers)}', 3_600_000)


def _wait_for_value(key: str) -> Any:
    while True:
        try:
            return json.loads(get_coordination_state().client.blocking_key_value_get(key, 10_000))
        except jax.errors.JaxRuntimeError as error:
            # Retry, because the other process may be slow. If it is lost, missing heartbeats end this process.
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise


def _describe_difference(first: Mapping[str, Any], other: Mapping[str, Any], process: str) -> str:
    for name in {**first, **other}:
        values = [str(side.get(name, 'absent')) for side in (first, other)]
        if values[0] != values[1]:
            # Truncate long values around their first difference.
            start = max(0, len(os.path.commonprefix(values)) - 40)
            expected, actual = (value[start : start + 120] for value in values)
            return (
                f'{name} must be the same in all processes of a run, got {expected} in process 0 and {actual} in '
                f'{process}; start all processes with the same command, code and data'
            )
    return ''


def is_connection_error(error: BaseException | None) -> bool:
    """Returns whether `error` or one of its causes is a failed connection between processes.

    False in a run with one process, because TensorStore describes failures of a bucket with the same words.
    """
    while error is not None and is_distributed():
        is_runtime_error = isinstance(error, jax.errors.JaxRuntimeError | ValueError)
        if is_runtime_error and any(word in str(error) for word in _CONNECTION_ERRORS):
            return True
        error = error.__cause__
    return False


class FailureWatcher:
    """Exits this process with a one-line error message if another process reports a failure.

    A process that is killed or hangs cannot report its failure; JAX then aborts all other processes within the
    heartbeat timeout (SIGABRT, exit code 134).

    `name` is the name of this process in error messages. `heartbeat_timeout` is in seconds. A thread polls for
    failures, so `jax.distributed` must be initialized.
    """

    def __init__(self, name: str, heartbeat_timeout: float):
        self._name, self._timeout = name, heartbeat_timeout
        self._closed = threading.Event()
        threading.Thread(target=self._poll_failure_key, name='failure watcher', daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def report_failure(self, code: int, text: str) -> None:
        """Sends this process's exit code and error message to all other processes, and waits up to 5 s for them."""
        self.close()
        record = {'process': get_coordination_state().process_id, 'code': code, 'text': text}
        # Setting the key fails if another process has already reported a failure, or if the coordinator is lost.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            get_coordination_state().client.key_value_set(_FAILURE_KEY, json.dumps(record))
        self._wait_before_exit()

    def wait_for_failure_report(self) -> None:
        """Waits for another process's failure report after a connection error.

        Other processes may detect the broken connection before the failed process reports its failure.
        """
        self._closed.wait(self._timeout + _POLL_SECONDS)

    def _poll_failure_key(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            try:
                record = json.loads(get_coordination_state().client.key_value_try_get(_FAILURE_KEY))
            except (jax.errors.JaxRuntimeError, AttributeError):
                continue
            if self._closed.is_set():
                return
            line = to_one_line(f'error ({self._name}): process {record["process"]} has failed: {record["text"]}')
            # Write to the file descriptor, because the main thread may hold the lock of sys.stderr.
            with contextlib.suppress(OSError):
                os.write(2, f'{line}\n'.encode())
            self._wait_before_exit()
            exit_process(record['code'])

    def _wait_before_exit(self) -> None:
        """Waits until all processes can exit. Process 0 exits last, because it runs the coordination service."""
        try:
            get_coordination_state().client.wait_at_barrier(_FAILURE_KEY, int(1000 * _EXIT_SECONDS))
        except jax.errors.JaxRuntimeError:
            return
        if get_coordination_state().process_id == 0:
            time.sleep(0.5)


def exit_process(code: int) -> None:
    """Exits the process immediately, because a normal exit would wait for the other processes at a barrier."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)
