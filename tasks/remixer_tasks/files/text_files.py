"""Reads lines of text files in bounded memory: plain or gzipped, local or in a bucket, a whole file or a part of it."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import io
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks.files.malformed import Malformed

# Bytes of a line or document. Longer than any book, and short enough to parse a few of them in memory.
LONGEST = 50_000_000
_CHUNK = 1 << 20
_UTF_16 = "the file is UTF-16: convert it (iconv -f utf-16 -t utf-8), or, for pairs, set ENCODING = 'utf-16'"
_FILE_SIGNATURES = {
    b'\x1f\x8b': 'the file is a gzip file: rename it, so that its name ends in .gz',
    b'PK\x03\x04': 'the file is a zip archive: unpack it, and give the files',
    b'PAR1': "the file is a Parquet file: give the format 'parquet', or rename it",
    codecs.BOM_UTF16_LE: _UTF_16,
    codecs.BOM_UTF16_BE: _UTF_16,
}


@dataclasses.dataclass(frozen=True)
class Part:
    """The lines of a local file whose first byte is in [start, end).

    Finding the bounds of all parts reads the file at most twice, however long its lines are: only a part in which a
    line begins looks for its end.

    Attributes:
        by_paragraph: moves both bounds to the end of the next blank line, so that no paragraph is divided.
    """

    start: int
    end: int
    by_paragraph: bool = False

    def find(self, file: Any) -> tuple[int, int]:
        """The offset and the number of bytes of the lines of this part."""
        first = self._boundary(file, self.start, self.end)
        last = None if first is None else self._boundary(file, self.end, sys.maxsize)
        return (0, 0) if first is None or last is None else (first, last - first)

    def _boundary(self, file: Any, offset: int, limit: int) -> int | None:
        """The first boundary at `offset` or after it; None if no line that begins before `limit` ends at one."""
        if offset == 0:
            return 0
        file.seek(offset - 1)
        is_blank = _skip_line(file, limit)
        while self.by_paragraph and is_blank is not None:
            if file.tell() >= limit:
                return None
            if is_blank := _skip_line(file, limit):
                break
        return None if is_blank is None else file.tell()


def _skip_line(file: Any, limit: int) -> bool | None:
    """Reads to the end of the line. Returns whether the line was blank, or the file was at its end; None if the line
    continues beyond `limit`.

    A blank line has only ASCII white space, and less than `_CHUNK` of it. The readers treat every such line as blank,
    and may treat more lines as blank.
    """
    chunk = file.readline(_CHUNK)
    is_blank = not chunk.strip() and len(chunk) < _CHUNK
    while chunk and not chunk.endswith(b'\n'):
        if file.tell() >= limit:
            return None
        chunk = file.readline(_CHUNK)
    return is_blank


@contextlib.contextmanager
def opened(path: str, advice: str = Malformed.file_advice) -> Iterator[BinaryIO | gzip.GzipFile]:
    """The file's bytes, decompressed if its name ends in .gz. Read errors raise UserError with `advice`."""
    try:
        with io.BufferedReader(_Remote(path), _CHUNK) if '://' in path else untrusted_files.opened(path) as file:
            if path.endswith('.gz'):
                with gzip.GzipFile(fileobj=file) as decompressed:
                    yield decompressed
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f'{path}: damaged gzip file ({error}); make it again, or rename it if it is plain') from error
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, 'strerror', None) or getattr(error, 'message', str(error)).splitlines()[0]
        raise UserError(f'{path}: {reason}; {advice}') from error


class _Remote(io.RawIOBase):
    """A file in a bucket. TensorFlow's own object has no `readline(size)`, which `io.BufferedReader` adds."""

    def __init__(self, path: str):
        self._file = tf.io.gfile.GFile(path, 'rb')

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        return self._file.tell()

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def lines(
    path: str, longest: int, malformed: Malformed, encoding: str = 'utf-8', part: Part | None = None
) -> Iterator[tuple[int, str]]:
    """(number, line without its end) of the valid lines; the others are too long, contain a NUL, or are not UTF-8.

    A file that begins like an archive or another kind of file is one malformed line. Numbers count from 1 at the start
    of the file or `part`; `malformed` records numbers in the file. Raises UserError for a file that is not text in
    `encoding`, unless that is UTF-8.
    """
    with opened(path, malformed.file_advice) as file:
        if codecs.lookup(encoding).name != 'utf-8':
            yield from _encoded_lines(path, file, longest, malformed, encoding)
            return
        start, size = part.find(file) if part else (0, sys.maxsize)
        if part:
            file.seek(start)
            malformed.lines_before = lambda: _count_lines(path, start)
        for number, chunk in _chunks(file, longest, size):
            is_start = number == 1 and start == 0
            kinds = [
                advice for mark, advice in _FILE_SIGNATURES.items() if is_start and (chunk or b'').startswith(mark)
            ]
            if kinds:
                malformed.record(path, 1, kinds[0])
                return
            if chunk is None:
                malformed.record(path, number, f'the line has more than {longest:,} bytes')
            else:
                yield from _lines_of(path, number, chunk, malformed, is_start)


def _count_lines(path: str, end: int) -> int:
    """The number of lines that end before byte `end`."""
    with opened(path) as file:
        return sum(file.read(min(_CHUNK, end - at)).count(b'\n') for at in range(0, end, _CHUNK))


def _chunks(file: Any, longest: int, size: int) -> Iterator[tuple[int, bytes | None]]:
    """(number of its first line, whole lines) of the next `size` bytes; None instead of a line of more than `longest`.

    A chunk has many lines, because a few operations per line would take most of the time of reading text.
    """
    if longest < _CHUNK:
        yield from _numbered(file, longest, b'\n', size)
        return
    number = 1
    while size > 0 and (data := file.read(min(_CHUNK, size))):
        cut = data.rfind(b'\n') + 1
        rest = data[cut:]
        if rest:
            rest += file.readline(longest + 1 - len(rest))
        is_whole = len(rest) <= longest or rest.endswith(b'\n')
        if is_whole:
            yield number, data[:cut] + rest
        elif cut:
            yield number, data[:cut]
        number += data.count(b'\n') + bool(rest)
        size -= cut + len(rest)
        if not is_whole:
            while rest and not rest.endswith(b'\n'):
                rest = file.readline(_CHUNK)
                size -= len(rest)
            yield number - 1, None


def _numbered(file: Any, longest: int, end: Any, size: int = sys.maxsize) -> Iterator[tuple[int, Any]]:
    """(number from 1, line with its `end`) of the next `size` bytes or characters; None instead of a line of more than
    `longest`.
    """
    number = 0
    while size > 0 and (line := file.readline(longest + 1)):
        number, size = number + 1, size - len(line)
        if len(line) <= longest or line.endswith(end):
            yield number, line
            continue
        while line and not line.endswith(end):
            line = file.readline(_CHUNK)
            size -= len(line)
        yield number, None


def _lines_of(path: str, first: int, chunk: bytes, malformed: Malformed, is_start: bool) -> Iterable[tuple[int, str]]:
    """The lines of a chunk: all at once if the chunk is text, and otherwise one by one."""
    with contextlib.suppress(UnicodeDecodeError):
        text = chunk.decode('utf-8-sig' if is_start else 'utf-8')
        if '\0' not in text:
            texts = text.removesuffix('\n').split('\n')
            return enumerate([line.rstrip('\r') for line in texts] if '\r' in text else texts, first)
    return _lines_one_by_one(path, first, chunk, malformed, is_start)


def _lines_one_by_one(
    path: str, first: int, chunk: bytes, malformed: Malformed, is_start: bool
) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(chunk.removesuffix(b'\n').split(b'\n'), first):
        if b'\0' in line:
            malformed.record(path, number, f'a NUL byte at byte {line.index(0)}')
            continue
        try:
            yield number, line.decode('utf-8-sig' if is_start and number == 1 else 'utf-8').rstrip('\r')
        except UnicodeDecodeError as error:
            malformed.record(path, number, f'invalid UTF-8 at byte {error.start}')


def _encoded_lines(
    path: str, file: BinaryIO | gzip.GzipFile, longest: int, malformed: Malformed, encoding: str
) -> Iterator[tuple[int, str]]:
    with io.TextIOWrapper(file, encoding=encoding, newline='\n') as text:  # type: ignore[type-var]
        try:
            for number, line in _numbered(text, longest, '\n'):
                if line is None or '\0' in line:
                    reason = f'the line has more than {longest:,} characters' if line is None else 'a NUL character'
                    malformed.record(path, number, reason)
                else:
                    yield number, line.rstrip('\r\n')
        except UnicodeError as error:
            raise UserError(f'ENCODING must be that of {path}, got {encoding!r} ({error})') from error
