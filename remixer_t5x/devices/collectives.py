"""Messages between the processes of a run, outside of computations: which process failed, and what the first decided.

Messages go through the key-value store of JAX's coordination service and do not use devices, so they also reach a
process that waits in a collective operation for a process that will never come.
"""

import contextlib
import json
import os
import sys
import threading
import time
from typing import Any

import jax

from remixer_t5x.devices.jax_workarounds import client
from remixer_t5x.errors import one_line

_FAILED = 'remixer_t5x/failed'
_POLL_SECONDS = 1.0
_FAREWELL_SECONDS = 5.0
# Words in errors of connections between processes.
_CONNECTIONS = ('Gloo', 'NCCL', 'UNAVAILABLE', 'coordination')
_said = 0
_met = 0


def broadcast(value: Any) -> Any:
    """The first process's `value` (JSON), on every process. All processes call this in the same order.

    Use it for facts that each process could see differently, such as which checkpoint is the newest.
    """
    service = client()
    if service is None or jax.process_count() == 1:
        return value
    global _said
    _said += 1
    key = f'remixer_t5x/said/{_said}'
    if jax.process_index() == 0:
        service.key_value_set(key, json.dumps(value))
        return value
    while True:
        try:
            return json.loads(service.blocking_key_value_get(key, 10_000))
        except jax.errors.JaxRuntimeError as error:
            # The first process may be slow; if it is lost, the heartbeat ends this process.
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise


def barrier() -> None:
    """Returns once every process has called it equally often."""
    if client() is not None and jax.process_count() > 1:
        global _met
        _met += 1
        # An hour means no limit: the heartbeat ends all processes if one is lost.
        client().wait_at_barrier(f'remixer_t5x/met/{_met}', 3_600_000)


class Watch:
    """Ends this process, with one line on standard error, if another process reports a failure.

    A process that is killed or stops answering cannot report one: JAX itself then aborts all others within the
    heartbeat timeout (SIGABRT, exit code 134).

    Args:
        name: of this process, for these lines.
        heartbeat_timeout: seconds, as passed to `jax.distributed.initialize`.
    """

    def __init__(self, name: str, heartbeat_timeout: float):
        self._name, self._timeout = name, heartbeat_timeout
        self._closed = threading.Event()

    def start(self) -> None:
        """Call this once the process is connected."""
        threading.Thread(target=self._look, name='peers', daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def failed(self, code: int, text: str) -> None:
        """Tells the other processes that this process exits with `code`, and why. Returns when they know, or after 5
        s.
        """
        self.close()
        record = {'process': jax.process_index(), 'code': code, 'text': text}
        # Another process was first, or the coordinator is lost.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client().key_value_set(_FAILED, json.dumps(record))
        self._part()

    def wait_for_reason(self, error: BaseException) -> None:
        """If `error` comes from a connection between processes, waits for the line that says which process failed.

        The neighbours of a lost process see a broken connection before any process knows why.
        """
        if isinstance(error, jax.errors.JaxRuntimeError) and any(name in str(error) for name in _CONNECTIONS):
            self._closed.wait(self._timeout + _POLL_SECONDS)

    def _look(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            try:
                record = json.loads(client().key_value_try_get(_FAILED))
            except (jax.errors.JaxRuntimeError, AttributeError):
                continue
            if self._closed.is_set():
                return
            self._say(f'error ({self._name}): process {record["process"]} has failed: {record["text"]}')
            self._part()
            leave(record['code'])

    def _part(self) -> None:
        """A barrier before processes exit. The first process exits last, because it holds the messages for the
        others.
        """
        try:
            client().wait_at_barrier(_FAILED, int(1000 * _FAREWELL_SECONDS))
        except jax.errors.JaxRuntimeError:
            return
        if jax.process_index() == 0:
            time.sleep(0.5)

    def _say(self, text: str) -> None:
        # The stuck thread may hold the lock of Python's own stream.
        os.write(2, f'{one_line(text)}\n'.encode())


def leave(code: int) -> None:
    """Exits at once: a normal exit would wait for the other processes at a barrier."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, RuntimeError):
            continue
    os._exit(code)
