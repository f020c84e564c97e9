"""Files from anybody as bytes and as lines of text: plain or gzipped, local or gs://, in bounded memory."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks.files import bounded_lines
from remixer_tasks.files.malformed import Malformed


@contextlib.contextmanager
def opened(path: str, advice: str = Malformed.file_advice) -> Iterator[BinaryIO | gzip.GzipFile]:
    """The file's bytes, unzipped if its name ends in .gz; an error while it is read is a UserError with `advice`."""
    try:
        with bounded_lines.remote(path) if '://' in path else open(path, 'rb') as file:
            if path.endswith('.gz'):
                with gzip.GzipFile(fileobj=file) as unzipped:
                    yield unzipped
            else:
                yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f'{path}: damaged gzip file ({error}); make it again, or rename it if it is not zipped'
        ) from error
    except (OSError, tf.errors.OpError) as error:
        reason = getattr(error, 'strerror', None) or getattr(error, 'message', str(error)).splitlines()[0]
        raise UserError(f'{path}: {reason}; {advice}') from error


def lines(path: str, longest: int, malformed: Malformed) -> Iterator[tuple[int, str]]:
    """(number from 1, line without its end), without the lines that are too long, have a NUL, or are not UTF-8."""
    with opened(path, malformed.file_advice) as file:
        for number, line in bounded_lines.numbered(file, longest):
            if line is None:
                malformed.record(path, number, f'the line has more than {longest:,} bytes')
            elif b'\0' in line:
                malformed.record(path, number, f'a NUL byte at byte {line.index(0)}')
            else:
                try:
                    yield number, line.decode('utf-8-sig' if number == 1 else 'utf-8').rstrip('\r\n')
                except UnicodeDecodeError as error:
                    malformed.record(path, number, f'invalid UTF-8 at byte {error.start}')
