"""Argument parsing, files and processes of the fakes. Options that the real program does not have are rejected."""

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

CLUSTER = pathlib.Path(os.environ.get('CLUSTER', '.'))
# Default timeout in seconds: much longer than a test takes on a busy machine.
TIMEOUT = 1200.0


def refuse(text: str) -> None:
    """Records the error, and exits as the real program does after an invalid argument."""
    print(f'{pathlib.Path(sys.argv[0]).stem}: {text}', file=sys.stderr)
    with (CLUSTER / 'refused').open('a') as file:
        file.write(f'{shlex.join(sys.argv)}: {text}\n')
    sys.exit(2)


def record_call() -> None:
    """Adds the command line to the file `calls`."""
    with (CLUSTER / 'calls').open('a') as file:
        file.write(f'{shlex.join([pathlib.Path(sys.argv[0]).stem, *sys.argv[1:]])}\n')


def parse_options(
    words: Sequence[str], values: Mapping[str, str], flags: Iterable[str] = (), required: Iterable[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Returns positional arguments, and options by name.

    `values` maps the options with a value to a regular expression for the value; `flags` have no value.
    """
    positional, options = [], {}
    for word in words:
        if not word.startswith('--'):
            positional.append(word)
            continue
        name, equals, value = word.removeprefix('--').partition('=')
        if name in flags and not equals:
            options[name] = ''
        elif name in values and equals and re.fullmatch(values[name], value, re.S):
            options[name] = value
        elif name in values:
            refuse(f'--{name} must match {values[name]}, got {value!r}')
        else:
            refuse(f'{word} is not an option of this command')
    for name in required:
        if name not in options:
            refuse(f'--{name} is missing')
    return positional, options


def check_positionals(arguments: Sequence[str], count: int) -> list[str]:
    """Returns the arguments, and rejects any other number of them."""
    if len(arguments) != count:
        refuse(f'expected {count} arguments, got {list(arguments)}')
    return list(arguments)


def start_detached(*command: str, **environment: str) -> None:
    """Starts a process that outlives this one."""
    subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=(CLUSTER / 'detached.log').open('a'),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def kill_group(leader: int) -> None:
    """Kills a process group unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def wait_until(condition, event: str, seconds: float = TIMEOUT) -> None:
    """Waits until `condition()` is true. Raises AssertionError after the timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f'{event} did not happen within {seconds:.0f} s')
        time.sleep(0.02)
