"""A command that starts as `python` does, in a process that has imported the libraries already.

Shells and commands under test start Python by a command line. `WarmPython.command` is one that hands its arguments,
folder, environment and input to the test process, which forks the server of `real_processes`, and says what came of it:
`-m MODULE`, `-c CODE` and `-` (code from standard input) work. Output comes when the process has ended. SIGTERM and
SIGINT are passed on, and the process is killed where the command is.
"""

import importlib
import itertools
import json
import os
import pathlib
import select
import socket
import socketserver
import sys
import tempfile
import threading
from typing import Any

from tests.support.real_processes import Process

# Reads its arguments, and imports nothing that takes time.
CLIENT = """
import json, os, signal, socket, sys
address, *words = sys.argv[1:]
given = sys.stdin.read() if words[0] == '-' else ''
with socket.socket(socket.AF_UNIX) as server:
    server.connect(address)
    request = {'words': words, 'folder': os.getcwd(), 'environment': dict(os.environ), 'input': given}
    server.sendall(json.dumps(request).encode() + b'\\n')
    answers = server.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    answer = json.loads(answers.readline())
sys.stdout.write(answer['output'])
sys.exit(answer['code'] if answer['code'] >= 0 else 128 - answer['code'])
"""


class WarmPython:
    """Answers `command` until it is closed. `compiled`: a folder of compiled programs, see `Process`."""

    def __init__(self, compiled: pathlib.Path):
        # Not in a folder of pytest's: the path of a socket has at most 107 bytes.
        self._folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self._folder.name)
        client, address = folder / 'client.py', folder / 'socket'
        client.write_text(CLIENT)
        self.command = (sys.executable, '-S', '-E', str(client), str(address))
        numbers, starting = itertools.count(1), threading.Lock()

        class Handler(socketserver.StreamRequestHandler):
            def handle(self):
                request = json.loads(self.rfile.readline())
                with starting:
                    process = Process(
                        interpret,
                        request['words'],
                        request['input'],
                        output=folder / f'output{next(numbers)}.txt',
                        environment=request['environment'],
                        folder=request['folder'],
                        compiled=compiled,
                    )
                self.wfile.write(f'{process.pid}\n'.encode())
                _wait(process, self.connection)
                answer = {'code': process.wait(), 'output': process.output()}
                self.wfile.write(json.dumps(answer).encode() + b'\n')

        self._server = _Server(str(address), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._folder.cleanup()


class _Server(socketserver.ThreadingUnixStreamServer):
    request_queue_size = 128
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # The command may be gone before its answer.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _wait(process: Process, connection: socket.socket) -> None:
    """Returns when the process has ended, killed where the other end of the connection is gone."""
    while process.running:
        if select.select([connection], [], [], 0.02)[0] and not connection.recv(1):
            process.kill()


def interpret(words: list[str], given: str) -> Any:
    """Does what Python does with the arguments `words` and the standard input `given`; the exit code."""
    own = [entry for entry in os.environ.get('PYTHONPATH', '').split(os.pathsep) if entry]
    sys.path[:0] = ['', *own]
    option, *rest = words
    try:
        if option == '-m':
            name, *arguments = rest
            # The command line restarts Python for settings of malloc, where it is a process of its own.
            return importlib.import_module(name).main(arguments)
        code = given if option == '-' else rest.pop(0)
        sys.argv = [option, *rest]
        exec(compile(code, '<string>', 'exec'), {'__name__': '__main__'})  # noqa: S102 (does what `python -c` does)
    except SystemExit as leaving:
        return leaving.code
    return 0
