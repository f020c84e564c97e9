"""Stores the results of a study as JSON lines, so that a restarted study skips finished cells."""

import contextlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Cell = Mapping[str, Any]


class ResultsFile:
    """A JSON lines file with the results of the finished cells of a study.

    A cell is a mapping with all settings that affect a result. An incomplete line from a killed process is ignored, and
    the cell is computed again.
    """

    def __init__(self, file: str | pathlib.Path):
        self._file = pathlib.Path(file)
        self._results: dict[str, dict[str, Any]] = {}
        for line in self._file.read_text(encoding='utf-8').splitlines() if self._file.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                record = json.loads(line)
                self._results[_build_cell_key(record['cell'])] = record['result']

    def find_result(self, cell: Cell) -> dict[str, Any] | None:
        """Returns the result of `cell`, or None if it is not finished."""
        return self._results.get(_build_cell_key(cell))

    def append_result(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Appends a result to the file."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # Starts a new line if the last line is incomplete.
        cut = self._file.exists() and not self._file.read_bytes().endswith(b'\n')
        with open(self._file, 'a', encoding='utf-8') as file:
            file.write('\n' * cut + json.dumps({'cell': cell, 'result': result}) + '\n')
        self._results[_build_cell_key(cell)] = dict(result)


def _build_cell_key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def format_summary(values: Sequence[float], digits: int = 2) -> str:
    """Formats the mean, sample standard deviation and number of values from several seeds."""
    if not values:
        return 'not yet run'
    spread = f' ({np.std(values, ddof=1):.{digits}f})' if len(values) > 1 else ''
    return f'{np.mean(values):.{digits}f}{spread} [{len(values)}]'


def parse_sorted_integers(text: str) -> list[int]:
    """Parses comma-separated integers; used as an argparse type."""
    return sorted({int(number) for number in text.split(',')})
