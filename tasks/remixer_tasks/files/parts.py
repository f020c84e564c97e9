"""Parts of large files, for several processes to read: bytes from one end of a line to another."""

from __future__ import annotations

import dataclasses
import io
import itertools
import sys
from collections.abc import Sequence
from typing import Any, BinaryIO

# Large enough that starting on a part costs nothing, small enough that all processes end at about the same time.
BYTES = 4 << 20
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Part:
    """The lines of a file from the first that begins at byte `start` or after, to the first that begins at `end` or
    after.

    paragraphs: both ends are moved on to the end of the next blank line, so that no paragraph is cut.
    is_last: the part ends where the file does.
    """

    start: int
    end: int
    paragraphs: bool = False
    is_last: bool = False

    def of(self, file: Any) -> BinaryIO:
        """The bytes of the part, as a file."""
        first = self._boundary(file, self.start, self.end)
        # Only the part where a line begins looks for its end: a long line would be read once by each of its parts.
        last = None if first is None else self._boundary(file, self.end, sys.maxsize)
        if first is None or last is None:
            return io.BytesIO()
        file.seek(first)
        return io.BufferedReader(_Limited(file, last - first), _CHUNK)

    def _boundary(self, file: BinaryIO, offset: int, limit: int) -> int | None:
        """The first place to cut at `offset` or after; None if no line that begins before `limit` leads to it."""
        if offset == 0:
            return 0
        file.seek(offset - 1)
        is_blank = _skip_line(file, limit)
        while self.paragraphs and is_blank is not None:
            if file.tell() >= limit:
                return None
            if is_blank := _skip_line(file, limit):
                break
        return None if is_blank is None else file.tell()


def _skip_line(file: BinaryIO, limit: int) -> bool | None:
    """Reads to the end of the line, in bounded memory. Returns whether the line was blank, or the file was at its end;
    None if the line continues beyond `limit`.

    A blank line has only ASCII white space, and less than `_CHUNK` of it. Any line that the reader takes for blank is a
    place to cut, so it may take more lines for blank.
    """
    piece = file.readline(_CHUNK)
    is_blank = not piece.strip() and len(piece) < _CHUNK
    while piece and not piece.endswith(b'\n'):
        if file.tell() >= limit:
            return None
        piece = file.readline(_CHUNK)
    return is_blank


def cut(size: int, paragraphs: bool) -> Sequence[Part]:
    """Parts that make up a file of this many bytes."""
    bounds = [*range(0, max(size - BYTES // 2, 1), BYTES), size]
    return [Part(start, end, paragraphs, end == size) for start, end in itertools.pairwise(bounds)]


def count_lines(file: Any, part: Part) -> int:
    """How many lines of the file end in the part."""
    found, view = 0, part.of(file)
    while chunk := view.read(_CHUNK):
        found += chunk.count(b'\n')
    return found


class _Limited(io.RawIOBase):
    """The next `left` bytes of a file."""

    def __init__(self, file: BinaryIO, left: int):
        self._file, self._left = file, left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)
