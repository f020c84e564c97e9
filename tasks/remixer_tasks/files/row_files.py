"""Rows out of a user's files: JSON lines, TSV, CSV and Parquet, plain or gzipped, local or gs://.

Readers stream; they hand rows that cannot be read to `Malformed`, and raise UserError for what makes a whole file
useless.
"""

import csv
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError
from remixer_tasks.files import bounded_lines
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.text_files import lines, opened

FORMATS = ('jsonl', 'tsv', 'csv', 'parquet')
Row = dict[str, Any]
# Numbers of lines (or rows) from 1, and rows.
Rows = Iterator[tuple[int, Row]]
EXTENSIONS = {'json': 'jsonl', 'ndjson': 'jsonl', **{name: name for name in FORMATS}}


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The layout of rows in files.

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
        return self.format or by_extension(path, EXTENSIONS, 'PAIRS_FORMAT')


def by_extension(path: str, formats: Mapping[str, str], setting: str) -> str:
    """The format of a file by its name (.gz or not). Raises UserError, naming `setting`, where it tells none."""
    name = path.lower().removesuffix('.gz').rsplit('/', 1)[-1]
    found = formats.get(name.rpartition('.')[2] if '.' in name else '')
    if found is None:
        allowed = ', '.join(dict.fromkeys(formats.values()))
        raise UserError(f'{path}: the extension does not tell the format, set {setting} to one of {allowed}')
    return found


def read(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    """The rows of one file, in order. Raises UserError, see the module."""
    format = layout.format_of(path)
    if format == 'parquet':
        return parquet_rows(path, 'PAIRS_FORMAT')
    readers = {'jsonl': json_rows, 'tsv': _tsv_rows, 'csv': _csv_rows}
    return readers[format](path, layout.longest, malformed)


def json_rows(path: str, longest: int, malformed: Malformed) -> Rows:
    """The objects of a file of JSON lines; blank lines are skipped."""
    for number, line in lines(path, longest, malformed):
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


def _tsv_rows(path: str, longest: int, malformed: Malformed) -> Rows:
    cells = ((number, line.split('\t')) for number, line in lines(path, longest, malformed) if line.strip())
    yield from _below_header(path, cells, malformed)


def _csv_rows(path: str, longest: int, malformed: Malformed) -> Rows:
    """As RFC 4180 has it: a quoted cell may hold commas, quotes and line ends."""
    last = 0

    def with_ends() -> Iterator[str]:
        nonlocal last
        for number, line in lines(path, longest, malformed):
            last = number
            yield f'{line}\n'

    before = csv.field_size_limit(min(longest, 2**31 - 1))
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


def parquet_rows(
    path: str, setting: str, choose: Callable[[list[str]], Sequence[str] | None] = lambda names: None
) -> Rows:
    """The rows of a Parquet file, with the columns that `choose` takes of those there (None: all).

    Raises UserError, naming `setting`, where the file is not Parquet, and what `choose` raises.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with opened(path) as file:
        try:
            # Parquet is read from its end, which a gzip stream does not allow.
            table = pq.ParquetFile(pa.BufferReader(file.read()) if path.endswith('.gz') else file)
            columns, number = choose(table.schema_arrow.names), 0
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except pa.ArrowException as error:
            raise UserError(
                f'{path}: not a readable Parquet file ({" ".join(str(error).split())}); make it again, or set {setting}'
            ) from error
