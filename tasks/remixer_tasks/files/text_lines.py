"""Opens files, which may be gzipped or in a bucket, and reads their lines in bounded memory.

Readers report unreadable records to `BadRecords`, and raise UserError if a whole file is unusable.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import re
import sys
import zlib
from collections.abc import Iterator
from typing import Any

from remixer_t5x import lazy_imports, untrusted_files
from remixer_t5x.errors import UserError, root_cause_message
from remixer_t5x.lazy_imports import tf

# Maximum number of characters of a line or document: longer than a book, but small enough for memory.
MAX_CHARACTERS = 50_000_000
# The path with which `open_bytes` reads standard input, even if it is a pipe. Error messages contain it.
STDIN = 'standard input'
_CHUNK = 1 << 20
# Characters that Python's error handler 'surrogateescape' substitutes for invalid UTF-8 (PEP 383).
_NOT_UTF_8 = re.compile('[\udc80-\udcff]')
# Maximum number of records whose locations are listed in `describe_skipped_records`.
_MAX_SHOWN = 3


class BadRecords:
    """Counts malformed and empty records, or raises UserError for the first one if `strict`.

    `file_advice` is printed if a whole file cannot be read, and `line_advice` if a record cannot be read.
    """

    def __init__(
        self,
        strict: bool,
        file_advice: str = 'correct the path or the file',
        line_advice: str = 'correct the line, or skip such lines with STRICT = False',
    ):
        self._strict, self.file_advice, self._line_advice = strict, file_advice, line_advice
        self._first: list[str] = []
        self.count = self._empty_count = 0

    def add_malformed_record(self, path: str, line: int, reason: str) -> None:
        """Records an unreadable line or row; `line` is its 1-based number. Raises UserError if strict."""
        problem = f'{path}:{line}: {reason}'
        if self._strict:
            raise UserError(f'{problem}; {self._line_advice}')
        self.count += 1
        if self.count <= _MAX_SHOWN:
            self._first.append(problem)

    def add_empty_record(self, path: str, line: int) -> None:
        """Records a line or row without text. Raises UserError if strict."""
        if self._strict:
            raise UserError(f'{path}:{line}: the text is empty; {self._line_advice}')
        self._empty_count += 1

    def get_skipped_counts(self) -> dict[str, Any]:
        """Returns the counts of skipped records as a JSON object, for `add_skipped_counts`."""
        return {'skipped': self.count, 'empty': self._empty_count, 'first': self._first}

    def add_skipped_counts(self, counts: dict[str, Any]) -> None:
        """Adds the counts of another `BadRecords` object, as returned by its method `get_skipped_counts`."""
        self.count += counts['skipped']
        self._empty_count += counts['empty']
        self._first = [*self._first, *counts['first']][:_MAX_SHOWN]

    def describe_skipped_records(self) -> str:
        """Returns the counts and locations of skipped records, to append to a message; '' if there are none."""
        more = ', ...' if self.count > _MAX_SHOWN else ''
        malformed = f', {self.count:,} malformed skipped ({", ".join(self._first)}{more})' if self.count else ''
        return malformed + (f', {self._empty_count:,} empty skipped' if self._empty_count else '')


@contextlib.contextmanager
def open_bytes(path: str, advice: str) -> Iterator[Any]:
    """Opens a file for reading bytes; decompresses a file named *.gz. Read errors raise UserError with `advice`."""
    try:
        if path == STDIN:
            opened: Any = open(sys.stdin.fileno(), 'rb', closefd=False)  # noqa: SIM115 (closed below)
        elif '://' in path:
            opened = io.BufferedReader(_RemoteFile(path), _CHUNK)
        else:
            opened = untrusted_files.open_file(path)
        with opened as file:
            if path.lower().endswith('.gz'):
                with gzip.GzipFile(fileobj=file) as decompressed:
                    yield decompressed
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f'{path}: damaged gzip file ({error}); compress it again, or remove .gz from its name'
        ) from error
    except lazy_imports.get_file_error_types() as error:
        raise UserError(f'{path}: {root_cause_message(error)}; {advice}') from error


class _RemoteFile(io.RawIOBase):
    """A file in a bucket, for `io.BufferedReader`, because TensorFlow's file objects lack `readline(size)`."""

    def __init__(self, path: str):
        self._file = tf.io.gfile.GFile(path, 'rb')
        self.tell = self._file.tell  # type: ignore[method-assign]
        self.readable = self.seekable = lambda: True  # type: ignore[method-assign]

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._file.seek(offset, whence)
        return self._file.tell()


def read_valid_lines(path: str, malformed: BadRecords, encoding: str = 'utf-8') -> Iterator[tuple[int, str]]:
    """Yields (line number, line) for each valid line. Numbers start at 1, and line ends are removed.

    A line is malformed if it has more than MAX_CHARACTERS, a NUL, or invalid UTF-8. If `encoding` is not UTF-8, text
    that cannot be decoded raises UserError.
    """
    is_utf_8 = codecs.lookup(encoding).name == 'utf-8'
    codec, errors = ('utf-8-sig', 'surrogateescape') if is_utf_8 else (encoding, 'strict')
    with open_bytes(path, malformed.file_advice) as file:
        with io.TextIOWrapper(file, codec, errors, newline='\n') as text:
            number = 0
            try:
                # The limit excludes the line end.
                while line := text.readline(MAX_CHARACTERS + 2):
                    number += 1
                    if len(line.removesuffix('\n').removesuffix('\r')) > MAX_CHARACTERS:
                        # Records the error before skipping the rest of the line, because skipping may take minutes.
                        malformed.add_malformed_record(
                            path, number, f'the line has more than {MAX_CHARACTERS:,} characters'
                        )
                        while line and not line.endswith('\n'):
                            line = text.readline(_CHUNK)
                    elif '\0' in line:
                        malformed.add_malformed_record(path, number, 'a NUL character')
                    elif not line.isascii() and _NOT_UTF_8.search(line):
                        malformed.add_malformed_record(path, number, 'invalid UTF-8')
                    else:
                        yield number, line.rstrip('\r\n')
            except UnicodeError as error:
                raise UserError(f'ENCODING must be the encoding of {path}, got {encoding!r} ({error})') from error
