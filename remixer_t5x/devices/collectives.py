"""What the processes of one run tell each other beside their computations: who failed, and what the first one decided.

It goes through the key-value store of JAX's coordination service, in which no device takes part: so it also reaches a
process that waits in a collective operation for one that will never come.
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

# Another process was lost or never came; the same command, started again everywhere, goes on.
LOST = 75
_FAILED = 'remixer_t5x/failed'
_POLL_SECONDS = 1.0
_FAREWELL_SECONDS = 5.0
# What errors of connections between processes name.
_CONNECTIONS = ('Gloo', 'NCCL', 'UNAVAILABLE', 'coordination')
_said = 0
_met = 0


def broadcast(value: Any) -> Any:
    """`value` (of JSON) as the first process gives it, on every process; all call it in the same order.

    For what each process looks up by itself, such as which checkpoint is the newest: they could see different things.
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
            # The first process may take its time; if it is gone, the heartbeat ends this one.
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise


def barrier() -> None:
    """Returns once every process has called it so many times."""
    if client() is not None and jax.process_count() > 1:
        global _met
        _met += 1
        # An hour stands for no limit: a process that is lost ends the others by its heartbeat.
        client().wait_at_barrier(f'remixer_t5x/met/{_met}', 3_600_000)


class Watch:
    """Ends this process, with one line on standard error, when another one has failed or is lost.

    `name` is what lines call this process. `failed` tells the others of a failure here.
    """

    def __init__(self, name: str, heartbeat_timeout: float):
        self._name, self._timeout = name, heartbeat_timeout
        self._leaving: int | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """To be called once this process is connected."""
        threading.Thread(target=self._look, name='peers', daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def failed(self, code: int, text: str) -> None:
        """Tells the others that this process leaves with `code` and why; returns when they know, or in 5 s."""
        self._leaving = code
        self.close()
        record = {'process': jax.process_index(), 'code': code, 'text': text}
        # Another one was first, or the coordinator is gone.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client().key_value_set(_FAILED, json.dumps(record))
        self._part()

    def wait_for_reason(self, error: BaseException) -> None:
        """Where `error` is of a connection between processes, waits for the line that says which one failed.

        A broken connection is seen by the neighbours of a process that is gone before anybody knows why.
        """
        if isinstance(error, jax.errors.JaxRuntimeError) and any(name in str(error) for name in _CONNECTIONS):
            self._closed.wait(self._timeout + _POLL_SECONDS)

    def lost(self, *_: Any) -> None:
        """What JAX calls when the coordinator is gone or says that a process is; ends this process."""
        if self._leaving is None:
            self._say(
                f'error ({self._name}): another process is gone or has not answered for {self._timeout:g} s; its own '
                'output says why; start all processes again, and the run goes on from its last checkpoint'
            )
        leave(LOST if self._leaving is None else self._leaving)

    def _look(self) -> None:
        while not self._closed.wait(_POLL_SECONDS):
            try:
                record = json.loads(client().key_value_try_get(_FAILED))
            except (jax.errors.JaxRuntimeError, AttributeError):
                continue
            if self._closed.is_set():
                return
            self._leaving = record['code']
            self._say(f'error ({self._name}): process {record["process"]} has failed: {record["text"]}')
            self._part()
            leave(record['code'])

    def _part(self) -> None:
        """All meet before they leave, the first one last: it holds what the others must read."""
        try:
            client().wait_at_barrier(_FAILED, int(1000 * _FAREWELL_SECONDS))
        except jax.errors.JaxRuntimeError:
            return
        if jax.process_index() == 0:
            time.sleep(0.5)

    def _say(self, text: str) -> None:
        # Python's own stream may be locked by the thread that is stuck.
        os.write(2, f'{one_line(text)}\n'.encode())


def leave(code: int) -> None:
    """At once: the usual end of a process would wait for the others at a barrier."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, RuntimeError):
            continue
    os._exit(code)
