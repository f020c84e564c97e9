"""Arguments and files of the stand-ins: an option that the real program does not have is refused."""

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
# Seconds for anything that a test waits for, also on a machine with much other work.
PATIENCE = 1200.0


def refuse(text: str) -> None:
    """Ends the stand-in as the real program ends after a wrong argument."""
    print(f'{pathlib.Path(sys.argv[0]).stem}: {text}', file=sys.stderr)
    with (CLUSTER / 'refused').open('a') as file:
        file.write(f'{shlex.join(sys.argv)}: {text}\n')
    sys.exit(2)


def called() -> None:
    """Notes the call."""
    with (CLUSTER / 'calls').open('a') as file:
        file.write(f'{shlex.join([pathlib.Path(sys.argv[0]).stem, *sys.argv[1:]])}\n')


def options(
    words: Sequence[str], values: Mapping[str, str], flags: Iterable[str] = (), required: Iterable[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Positional arguments, and options by name.

    `values` are the options that take a value, with a regular expression for it; `flags` take none.
    """
    positional, found = [], {}
    for word in words:
        if not word.startswith('--'):
            positional.append(word)
            continue
        name, equals, value = word.removeprefix('--').partition('=')
        if name in flags and not equals:
            found[name] = ''
        elif name in values and equals and re.fullmatch(values[name], value, re.S):
            found[name] = value
        elif name in values:
            refuse(f'--{name} takes {values[name]}, got {value!r}')
        else:
            refuse(f'{word} is not an option of this command')
    for name in required:
        if name not in found:
            refuse(f'--{name} is missing')
    return positional, found


def positionals(found: Sequence[str], count: int) -> list[str]:
    """Refuses any other number of them."""
    if len(found) != count:
        refuse(f'{count} arguments are expected, got {list(found)}')
    return list(found)


def detach(*command: str, **environment: str) -> None:
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
    """SIGKILL to a process and all of its group, which may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def until(condition, what: str, seconds: float = PATIENCE) -> None:
    """Waits; raises AssertionError where `condition()` does not come true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f'{what} did not happen within {seconds:.0f} s')
        time.sleep(0.02)
