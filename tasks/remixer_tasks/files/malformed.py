"""Records that cannot be read, or hold nothing: counted and skipped, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remixer_t5x.errors import UserError

_SHOWN = 3


class Malformed:
    """Collects malformed and empty records. strict: the first one raises UserError instead; before: `record_of_skipped`
    of what was read before.

    `file_advice` is what to type when the whole file cannot be read.
    """

    file_advice = 'correct FILES or the file'

    def __init__(self, strict: bool, before: Mapping[str, Any] | None = None):
        before = before or {}
        self._strict = strict
        self._first: list[str] = list(before.get('first', ()))
        self.count: int = before.get('skipped', 0)
        self.empty_count: int = before.get('empty', 0)

    def record(self, path: str, line: int, reason: str) -> None:
        """Notes that line (or row) `line`, from 1, of `path` cannot be read. Raises UserError when strict."""
        where = f'{path}:{line}: {reason}'
        if self._strict:
            raise UserError(f'{where}; correct the line, or skip such lines with STRICT = False')
        self.count += 1
        if self.count <= _SHOWN:
            self._first.append(where)

    def empty(self, path: str, line: int) -> None:
        """Notes that the record there is well formed and has no text. Raises UserError when strict."""
        if self._strict:
            raise UserError(f'{path}:{line}: the text is empty; remove it, or skip such lines with STRICT = False')
        self.empty_count += 1

    def add(self, path: str, before: int, notes: Notes) -> None:
        """Adds what was noted of a part of `path` that follows `before` lines. Raises UserError when strict."""
        shown = 0
        for line, reason in notes.first:
            if reason is None:
                self.empty(path, before + line)
            else:
                self.record(path, before + line, reason)
                shown += 1
        self.count += notes.count - shown
        self.empty_count += max(notes.empty_count - 1, 0)

    def record_of_skipped(self) -> dict[str, Any]:
        """JSON values: how many malformed ('skipped') and 'empty' records, and where the 'first' malformed ones are."""
        return {'skipped': self.count, 'empty': self.empty_count, 'first': list(self._first)}

    def summary(self) -> str:
        """What was skipped and where, for the end of a line; empty when nothing was."""
        parts = []
        if self.count:
            more = ', ...' if self.count > _SHOWN else ''
            parts.append(f', {self.count:,} malformed skipped ({", ".join(self._first)}{more})')
        if self.empty_count:
            parts.append(f', {self.empty_count:,} empty skipped')
        return ''.join(parts)


class Notes(Malformed):
    """Malformed and empty records of a part of a file, noted in one process and added to `Malformed` in another.

    `first` has the first records of each kind, in order: the line in the part, and the reason (None: empty).
    """

    def __init__(self) -> None:
        super().__init__(strict=False)
        self.first: list[tuple[int, str | None]] = []

    def record(self, path: str, line: int, reason: str) -> None:
        if self.count < _SHOWN:
            self.first.append((line, reason))
        self.count += 1

    def empty(self, path: str, line: int) -> None:
        if not self.empty_count:
            self.first.append((line, None))
        self.empty_count += 1
