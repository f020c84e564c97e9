"""Where the time of a process went: steps, waiting for data, compilation, restoring, evaluation, checkpoints, the rest.

Each moment belongs to one of these, so they add up to the time since `Timeline` was made.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping

from etils import epath

from remixer_t5x import untrusted_files
from remixer_t5x.run_folder import object_store

STEPS, DATA, COMPILE, RESTORE = 'steps', 'data', 'compile', 'restore'
EVALUATION, CHECKPOINT, IDLE = 'evaluation', 'checkpoint', 'idle'
# In MODEL_DIR: a line for each process of the run that came to its end.
FILE = 'goodput.jsonl'


class Timeline:
    """Begins in IDLE, which is also all that is not one of the others: imports, opening files, closing them."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._name, self._since = clock, IDLE, clock()
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """The time of the block belongs to `name`, except for that of blocks within it."""
        outer = self._name
        self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def seconds(self) -> dict[str, float]:
        """Seconds by name until now, the most first."""
        self._switch(self._name)
        return dict(sorted(self._seconds.items(), key=lambda pair: -pair[1]))

    def _switch(self, name: str) -> None:
        now = self._clock()
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now


def describe(seconds: Mapping[str, float]) -> str:
    """'steps 93.1% · compile 4.0% · idle 2.9%', without what took less than a thousandth."""
    total = sum(seconds.values()) or 1.0
    return ' · '.join(f'{name} {100 * part / total:.1f}%' for name, part in seconds.items() if part >= total / 1000)


def add(folder: epath.Path, first: int, last: int, seconds: Mapping[str, float]) -> None:
    """Adds the line of a process that went from step `first` to step `last`. Raises object_store.CannotWrite."""
    path = folder / FILE
    line = json.dumps({'first': first, 'last': last, 'seconds': {name: round(s, 3) for name, s in seconds.items()}})
    with object_store.writing(path):
        known = untrusted_files.read_text(path, 'move it away') if path.exists() else ''
        object_store.replace(path, f'{known}{line}\n')


def read(folder: epath.Path) -> dict[str, float]:
    """Seconds by name, added up over the processes of a run; {} if none has come to its end."""
    path, total = folder / FILE, dict[str, float]()
    if not path.exists():
        return {}
    with object_store.reading(path):
        for line in untrusted_files.json_lines(path):
            found = line.value.get('seconds') if isinstance(line.value, dict) else None
            for name, value in found.items() if isinstance(found, dict) else ():
                if isinstance(value, int | float) and 0 <= value < 1e12:
                    total[str(name)] = total.get(str(name), 0.0) + value
    return dict(sorted(total.items(), key=lambda pair: -pair[1]))
