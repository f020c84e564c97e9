"""Results of a study as lines of JSON: one is added as soon as it is known, and a study skips what is there."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from remixer_t5x.extras.reports.differences import student_interval

Cell = Mapping[str, Any]


class Records:
    """Finished cells of a study in a file.

    A cell is what was asked for, under `cell`: all settings that change the result. A line that was cut off when its
    process died is ignored, and its cell is done again.
    """

    def __init__(self, file: str | pathlib.Path):
        self._file = pathlib.Path(file)
        self._results: dict[str, dict[str, Any]] = {}
        self.ignored = 0
        if self._file.exists():
            for line in self._file.read_text(encoding='utf-8').splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            record = json.loads(line)
            self._results[_key(record['cell'])] = record['result']
        except (ValueError, KeyError, TypeError):
            self.ignored += 1

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """The result of `cell`, None where it is not done."""
        return self._results.get(_key(cell))

    def add(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Appends to the file at once."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # A cut-off line has no end: what follows it must not be lost with it.
        cut = self._file.exists() and not self._file.read_bytes().endswith(b'\n')
        with open(self._file, 'a', encoding='utf-8') as file:
            file.write('\n' * cut + json.dumps({'cell': cell, 'result': result}) + '\n')
        self._results[_key(cell)] = dict(result)


def run_missing(records: Records, trials: Iterable[Any], run: Callable[[Any], Mapping[str, Any]]) -> None:
    """Runs each trial, a dataclass, that has no result yet; adds its result, and prints it without its lists."""
    for trial in trials:
        cell = dataclasses.asdict(trial)
        if records.get(cell) is None:
            result = run(trial)
            records.add(cell, result)
            shown = {name: value for name, value in result.items() if not isinstance(value, list)}
            print(f'{trial}: {shown}', flush=True)


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def summary(values: Sequence[float], digits: int = 2) -> str:
    """Mean, standard deviation of a sample, and number of seeds."""
    if not values:
        return 'not yet run'
    spread = f' ({np.std(values, ddof=1):.{digits}f})' if len(values) > 1 else ''
    return f'{np.mean(values):.{digits}f}{spread} [{len(values)}]'


def paired(ours: Sequence[float], theirs: Sequence[float], digits: int = 2) -> str:
    """Mean difference between results of one seed, ± half of its 90% interval, which is Student's."""
    if not len(ours):
        return ''
    mean, margin = student_interval(np.subtract(ours, theirs))
    return f'{mean:+.{digits}f}' + (f' ± {margin:.{digits}f}' if np.isfinite(margin) else '')
