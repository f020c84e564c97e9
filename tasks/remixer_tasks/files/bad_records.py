"""Counts malformed and empty records in user data, or raises UserError for the first such record."""

from __future__ import annotations

from typing import Any

from remixer_t5x.errors import UserError

# Maximum number of records to locate in `summary`.
_MAX_SHOWN = 3


class BadRecords:
    """Counts malformed and empty records, or raises UserError for the first one if `strict`.

    `file_advice` is printed if a whole file cannot be read, and `line_advice` if a record cannot be read.
    """

    def __init__(
        self,
        strict: bool,
        file_advice: str = 'correct FILES or the file',
        line_advice: str = 'correct the line, or skip such lines with STRICT = False',
    ):
        self._strict, self.file_advice, self._line_advice = strict, file_advice, line_advice
        self._first: list[str] = []
        self.count = self._empty_count = 0

    def record(self, path: str, line: int, reason: str) -> None:
        """Records an unreadable line or row, counted from 1. Raises UserError if strict."""
        problem = f'{path}:{line}: {reason}'
        if self._strict:
            raise UserError(f'{problem}; {self._line_advice}')
        self.count += 1
        if self.count <= _MAX_SHOWN:
            self._first.append(problem)

    def record_empty(self, path: str, line: int) -> None:
        """Records a line or row without text. Raises UserError if strict."""
        if self._strict:
            raise UserError(f'{path}:{line}: the text is empty; {self._line_advice}')
        self._empty_count += 1

    def counts(self) -> dict[str, Any]:
        """Returns the counts of skipped records as a JSON object, for `add_counts`."""
        return {'skipped': self.count, 'empty': self._empty_count, 'first': self._first}

    def add_counts(self, counts: dict[str, Any]) -> None:
        """Adds the counts of another `BadRecords` object, as returned by its method `counts`."""
        self.count += counts['skipped']
        self._empty_count += counts['empty']
        self._first = [*self._first, *counts['first']][:_MAX_SHOWN]

    def summary(self) -> str:
        """Returns the counts and locations of skipped records, to append to a message; '' if there are none."""
        more = ', ...' if self.count > _MAX_SHOWN else ''
        malformed = f', {self.count:,} malformed skipped ({", ".join(self._first)}{more})' if self.count else ''
        return malformed + (f', {self._empty_count:,} empty skipped' if self._empty_count else '')
