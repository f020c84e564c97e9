"""Rows out of a user's files: JSON lines, TSV, CSV and Parquet, plain or gzipped, local or gs://.

As `documents`, but whole rows. Readers stream; they hand rows that cannot be read to `Malformed`, and raise UserError
for what makes a whole file useless.
"""

import csv
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from remixer_t5x.errors import UserError
from tasks import bounded_lines
from tasks.documents import lines, opened
from tasks.malformed import Malformed

FORMATS = ('jsonl', 'tsv', 'csv', 'parquet')
Row = dict[str, Any]
# Numbers of lines (or rows) from 1, and rows.
Rows = Iterator[tuple[int, Row]]
_EXTENSIONS = {'json': 'jsonl', 'ndjson': 'jsonl', **{name: name for name in FORMATS}}


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How rows lie in the files.

    format: one of FORMATS, or None to go by each file's extension. TSV and CSV begin with a line of column names.
    longest: bytes of a line; a longer one is malformed, and never held in memory as a whole.
    """

    format: str | None = None
    longest: int = bounded_lines.LONGEST

    def __post_init__(self):
        if self.format not in (None, *FORMATS):
            raise UserError(
                f'PAIRS_FORMAT is {self.format!r}, allowed are {", ".join(FORMATS)}: or None to go by the extension of '
                'each file'
            )

    def format_of(self, path: str) -> str:
        """The format of this file. Raises UserError when neither setting nor extension says it."""
        name = path.lower().removesuffix('.gz').rsplit('/', 1)[-1]
        found = self.format or _EXTENSIONS.get(name.rpartition('.')[2] if '.' in name else '')
        if found is None:
            raise UserError(
                f'{path}: the extension does not tell the format, set PAIRS_FORMAT to one of {", ".join(FORMATS)}'
            )
        return found


def read(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    """The rows of one file, in order. Raises UserError, see the module."""
    readers = {'jsonl': _read_jsonl, 'tsv': _read_tsv, 'csv': _read_csv, 'parquet': _read_parquet}
    return readers[layout.format_of(path)](path, layout, malformed)


def _read_jsonl(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    for number, line in lines(path, layout.longest, malformed):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            malformed.record(path, number, f'invalid JSON ({error})')
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            malformed.record(path, number, 'the line is not a JSON object')


def _read_tsv(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    cells = ((number, line.split('\t')) for number, line in lines(path, layout.longest, malformed) if line.strip())
    yield from _below_header(path, cells, malformed)


def _read_csv(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    """As RFC 4180 has it: a quoted cell may hold commas, quotes and line ends."""
    last = 0

    def with_ends() -> Iterator[str]:
        nonlocal last
        for number, line in lines(path, layout.longest, malformed):
            last = number
            yield f'{line}\n'

    before = csv.field_size_limit(min(layout.longest, 2**31 - 1))
    try:
        cells = ((last, row) for row in csv.reader(with_ends()) if row)
        yield from _below_header(path, cells, malformed)
    except csv.Error as error:
        raise UserError(
            f'{path} line {last}: not readable as CSV ({error}); make it again, or set PAIRS_FORMAT'
        ) from error
    finally:
        csv.field_size_limit(before)


def _below_header(path: str, cells: Iterator[tuple[int, list[str]]], malformed: Malformed) -> Rows:
    _, header = next(cells, (0, []))
    for number, row in cells:
        if len(row) == len(header):
            yield number, dict(zip(header, row, strict=True))
        else:
            malformed.record(path, number, f'{len(row)} columns, the first line has {len(header)}')


def _read_parquet(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with opened(path) as file:
        try:
            # Parquet is read from its end, which a gzip stream does not allow.
            table = pq.ParquetFile(pa.BufferReader(file.read()) if path.endswith('.gz') else file)
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except pa.ArrowException as error:
            raise UserError(
                f'{path}: not a readable Parquet file ({" ".join(str(error).split())}); make it again, '
                'or set PAIRS_FORMAT'
            ) from error
