"""A substitute for the `python` command that runs code in a process that has already imported the libraries.

Some tests run scripts that start Python. `WarmPython.command` is a small client that sends its arguments, working
directory, environment and input to the test process, which forks the server of `real_processes`. It supports
`-m MODULE`, `-c CODE` and `-` (code from standard input), and prints the output after the process has ended. It
forwards SIGTERM and SIGINT; if the client is killed, the process is killed.
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

# The client imports only small modules, so that it starts quickly.
CLIENT = """
import json, os, signal, socket, sys
address, *words = sys.argv[1:]
stdin = sys.stdin.read() if words[0] == '-' else ''
with socket.socket(socket.AF_UNIX) as server:
    server.connect(address)
    request = {'words': words, 'folder': os.getcwd(), 'environment': dict(os.environ), 'input': stdin}
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
    """A server for `command`."""

    def __init__(self):
        # The folders of pytest are too long for the path of a socket, which has at most 107 bytes.
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
                    )
                self.wfile.write(f'{process.pid}\n'.encode())
                _wait_for_end(process, self.connection)
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
        # The client may have been killed.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _wait_for_end(process: Process, connection: socket.socket) -> None:
    """Waits for the end of the process, and kills it if the client has closed the connection."""
    while process.running:
        if select.select([connection], [], [], 0.02)[0] and not connection.recv(1):
            process.kill()


def interpret(words: list[str], stdin: str) -> Any:
    """Runs code as `python *words` does, and returns the exit code."""
    python_path = [entry for entry in os.environ.get('PYTHONPATH', '').split(os.pathsep) if entry]
    sys.path[:0] = ['', *python_path]
    option, *rest = words
    try:
        if option == '-m':
            name, *arguments = rest
            return importlib.import_module(name).main(arguments)
        code = stdin if option == '-' else rest.pop(0)
        sys.argv = [option, *rest]
        exec(compile(code, '<string>', 'exec'), {'__name__': '__main__'})  # noqa: S102 (does what `python -c` does)
    except SystemExit as exit_request:
        return exit_request.code
    return 0
