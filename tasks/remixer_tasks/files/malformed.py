"""Counts and skips malformed and empty records of a user's data, or raises UserError for the first one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remixer_t5x.errors import UserError

_SHOWN = 3


class Malformed:
    """Collects malformed and empty records.

    Attributes:
        file_advice: what to type if a whole file cannot be read.
        count: malformed records.
        empty_count: empty records.
        lines_before: counts the lines before the part of a file that is being read; called only for a record that is
            shown.
    """

    file_advice = 'correct FILES or the file'

    def __init__(self, strict: bool):
        """strict: the first malformed or empty record raises UserError."""
        self._strict = strict
        self._first: list[str] = []
        self.count = self.empty_count = 0
        self.lines_before: Callable[[], int] = lambda: 0

    def record(self, path: str, line: int, reason: str) -> None:
        """Records that line (or row) `line`, from 1, of `path` cannot be read. Raises UserError if strict."""
        self.count += 1
        if self._strict or self.count <= _SHOWN:
            self._first.append(f'{path}:{self.lines_before() + line}: {reason}')
        if self._strict:
            raise UserError(f'{self._first[-1]}; correct the line, or skip such lines with STRICT = False')

    def empty(self, path: str, line: int) -> None:
        """Records that the record there has no text. Raises UserError if strict."""
        if self._strict:
            line += self.lines_before()
            raise UserError(f'{path}:{line}: the text is empty; remove it, or skip such lines with STRICT = False')
        self.empty_count += 1

    def counts(self) -> dict[str, int]:
        """The numbers of malformed ('skipped') and 'empty' records."""
        return {'skipped': self.count, 'empty': self.empty_count}

    def skipped(self) -> dict[str, Any]:
        """`counts` and the 'first' malformed records, as JSON values."""
        return {**self.counts(), 'first': self._first}

    def add(self, skipped: dict[str, Any]) -> None:
        """Adds the `skipped` of another part of the data."""
        self.count += skipped['skipped']
        self.empty_count += skipped['empty']
        self._first = [*self._first, *skipped['first']][:_SHOWN]

    def summary(self) -> str:
        """What was skipped and where, to append to a line; empty if nothing was."""
        parts = []
        if self.count:
            more = ', ...' if self.count > _SHOWN else ''
            parts.append(f', {self.count:,} malformed skipped ({", ".join(self._first)}{more})')
        if self.empty_count:
            parts.append(f', {self.empty_count:,} empty skipped')
        return ''.join(parts)
