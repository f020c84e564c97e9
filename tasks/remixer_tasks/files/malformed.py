"""Records that cannot be read, or hold nothing: counted and skipped, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remixer_t5x.errors import UserError

_SHOWN = 3


class Malformed:
    """Collects malformed and empty records. strict: the first one raises UserError instead.

    `file_advice` is what to type when the whole file cannot be read. `lines_before` counts the lines before the part of
    a file that is being read; it is called only for a record that is shown.
    """

    file_advice = 'correct FILES or the file'

    def __init__(self, strict: bool):
        self._strict = strict
        self._first: list[str] = []
        self.count = self.empty_count = 0
        self.lines_before: Callable[[], int] = lambda: 0

    def record(self, path: str, line: int, reason: str) -> None:
        """Notes that line (or row) `line`, from 1, of `path` cannot be read. Raises UserError when strict."""
        self.count += 1
        if self._strict or self.count <= _SHOWN:
            self._first.append(f'{path}:{self.lines_before() + line}: {reason}')
        if self._strict:
            raise UserError(f'{self._first[-1]}; correct the line, or skip such lines with STRICT = False')

    def empty(self, path: str, line: int) -> None:
        """Notes that the record there is well formed and has no text. Raises UserError when strict."""
        if self._strict:
            line += self.lines_before()
            raise UserError(f'{path}:{line}: the text is empty; remove it, or skip such lines with STRICT = False')
        self.empty_count += 1

    def add(self, noted: dict[str, Any]) -> None:
        """Adds the `noted` of another part of the data."""
        self.count += noted['skipped']
        self.empty_count += noted['empty']
        self._first = [*self._first, *noted['first']][:_SHOWN]

    def noted(self) -> dict[str, Any]:
        """JSON values: how many malformed ('skipped') and 'empty' records, and the 'first' malformed ones."""
        return {'skipped': self.count, 'empty': self.empty_count, 'first': self._first}

    def summary(self) -> str:
        """What was skipped and where, for the end of a line; empty when nothing was."""
        parts = []
        if self.count:
            more = ', ...' if self.count > _SHOWN else ''
            parts.append(f', {self.count:,} malformed skipped ({", ".join(self._first)}{more})')
        if self.empty_count:
            parts.append(f', {self.empty_count:,} empty skipped')
        return ''.join(parts)
