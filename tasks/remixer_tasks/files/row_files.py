"""Rows of a user's files: JSON lines, TSV, CSV and Parquet, plain or gzipped, local or gs://.

Readers stream; they pass rows that cannot be read to `Malformed`, and raise UserError for what makes a whole file
useless.
"""

import collections
import csv
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_tasks.files import text_files
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.text_files import Part

FORMATS = ('jsonl', 'tsv', 'csv', 'parquet')
Row = dict[str, Any]
# Numbers of lines (or rows) from 1, and rows.
Rows = Iterator[tuple[int, Row]]
Cells = Iterator[tuple[int, list[str]]]
EXTENSIONS = {'json': 'jsonl', 'ndjson': 'jsonl', **{name: name for name in FORMATS}}


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The layout of rows in files.

    Attributes:
        format: one of FORMATS, or None to use each file's extension. TSV and CSV begin with a line of column names.
        longest: bytes of a line; a longer one is malformed, and never held in memory as a whole.
        delimiter: between the columns of TSV and CSV; None is a tab or a comma.
        encoding: of JSON lines, TSV and CSV.
        numbered: columns of TSV and CSV are called 0, 1, 2, ..., and the first line is a row, unless it has these
            names.
    """

    format: str | None = None
    longest: int = text_files.LONGEST
    delimiter: str | None = None
    encoding: str = 'utf-8'
    numbered: bool = False

    def __post_init__(self):
        if self.format not in (None, *FORMATS):
            raise UserError(
                f'PAIRS_FORMAT must be {", ".join(FORMATS)} or None, got {self.format!r}; None uses the extensions'
            )
        text = self.delimiter
        if text is not None and not (isinstance(text, str) and len(text) == 1 and text not in '"\r\n\0'):
            raise UserError(f"DELIMITER must be one character or None, got {text!r}; type DELIMITER = ';'")
        try:
            ''.encode(self.encoding)
        except (LookupError, TypeError, ValueError) as error:
            text = f"ENCODING must be an encoding of text, as 'latin-1', got {self.encoding!r} ({error})"
            raise UserError(text) from error

    def format_of(self, path: str) -> str:
        """The format of this file. Raises UserError if neither setting nor extension names it."""
        return self.format or by_extension(path, EXTENSIONS, 'PAIRS_FORMAT')


def by_extension(path: str, formats: Mapping[str, str], setting: str) -> str:
    """The format of a file by its name, with or without .gz. Raises UserError, with `setting`, for any other."""
    name = path.lower().removesuffix('.gz').rsplit('/', 1)[-1]
    extension = name.rpartition('.')[2] if '.' in name else ''
    if extension not in formats:
        allowed = ', '.join(dict.fromkeys(formats.values()))
        raise UserError(f'{path}: unknown extension; set {setting} to one of {allowed}')
    return formats[extension]


def read(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    """The rows of one file, in order. Raises UserError, see the module."""
    format = layout.format_of(path)
    if format == 'parquet':
        return parquet_rows(path, 'PAIRS_FORMAT')
    if format == 'jsonl':
        return json_rows(path, layout.longest, malformed, layout.encoding)
    return (_tsv_rows if format == 'tsv' else _csv_rows)(path, layout, malformed)


def json_rows(path: str, longest: int, malformed: Malformed, encoding: str = 'utf-8', part: Part | None = None) -> Rows:
    """The objects of a file of JSON lines, or of a part of it; blank lines are skipped."""
    is_first = part is None or part.start == 0
    for number, line in text_files.lines(path, longest, malformed, encoding, part):
        if not line.strip():
            continue
        try:
            # Other programs write NaN where a value is missing.
            row = untrusted_files.parse(line, odd_numbers=True)
        except untrusted_files.NotJson as error:
            if is_first:
                _check_first_line(path, line)
            malformed.record(path, number, str(error))
            continue
        if is_first and isinstance(row, list):
            _check_first_line(path, line)
        is_first = False
        if isinstance(row, dict):
            yield number, row
        else:
            malformed.record(path, number, 'the line is not a JSON object')


def _check_first_line(path: str, line: str) -> None:
    """Raises UserError for a file that has JSON, but not JSON lines."""
    if line.lstrip().startswith('['):
        raise UserError(f"{path} is one JSON array; write one object on each line: jq -c '.[]' FILE > FILE.jsonl")
    if line.strip() == '{':
        raise UserError(f'{path} has objects over several lines; write one on each line: jq -c . FILE > FILE.jsonl')
    if '\r' in line.strip():
        raise _carriage_returns(path)


def _carriage_returns(path: str) -> UserError:
    return UserError(f"{path} ends its lines with CR alone; convert it: tr '\\r' '\\n' < FILE > NEW_FILE")


def _tsv_rows(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    numbered = text_files.lines(path, layout.longest, malformed, layout.encoding)
    cells = ((number, line.split(layout.delimiter or '\t')) for number, line in numbered if line.strip())
    yield from _with_names(path, cells, layout, malformed)


def _csv_rows(path: str, layout: RowLayout, malformed: Malformed) -> Rows:
    """RFC 4180: a quoted cell may contain commas, quotes and line ends."""
    before = csv.field_size_limit(min(layout.longest, 2**31 - 1))
    try:
        yield from _with_names(path, _csv_cells(path, layout, malformed), layout, malformed)
    finally:
        csv.field_size_limit(before)


def _csv_cells(path: str, layout: RowLayout, malformed: Malformed) -> Cells:
    last = 0

    def with_ends() -> Iterator[str]:
        nonlocal last
        for number, line in text_files.lines(path, layout.longest, malformed, layout.encoding):
            last = number
            yield f'{line}\n'

    # If not strict, the module reads an unclosed quote to the end of the file, as one cell.
    reader = csv.reader(with_ends(), delimiter=layout.delimiter or ',', strict=True)
    while True:
        before = last
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if 'new-line' in str(error):
                raise _carriage_returns(path) from error
            if last > before + 1 or 'unexpected end' in str(error) or 'field larger' in str(error):
                raise UserError(
                    f'{path} line {before + 1}: a cell that begins here with a quote is not closed by one ({error}); '
                    'correct the line, or set PAIRS_FORMAT'
                ) from error
            malformed.record(path, last, f'invalid CSV ({error})')
            continue
        if cells:
            yield last, cells


def _with_names(path: str, cells: Cells, layout: RowLayout, malformed: Malformed) -> Rows:
    """The rows below the line of column names; all rows if columns are numbered."""
    skipped = malformed.count
    number, names = next(cells, (0, []))
    first = []
    if layout.numbered and names != [str(column) for column in range(len(names))]:
        first, names = [(number, names)], [str(column) for column in range(len(names))]
    elif malformed.count > skipped:
        raise UserError(
            f'{path}: the line of column names cannot be read{malformed.summary()}; correct it, or set ENCODING, as in '
            "ENCODING = 'latin-1'"
        )
    duplicates = sorted(name for name, count in collections.Counter(names).items() if count > 1)
    if duplicates:
        raise UserError(f'{path} has two columns {duplicates[0]!a:.60}; rename one')
    for number, row in itertools.chain(first, cells):
        if len(row) == len(names):
            yield number, dict(zip(names, row, strict=True))
        else:
            malformed.record(path, number, f'{len(row)} columns, the first line has {len(names)}')
    if number <= 1 and any('\r' in name for name in names):
        raise _carriage_returns(path)


def parquet_rows(
    path: str, setting: str, choose: Callable[[list[str]], Sequence[str] | None] = lambda names: None
) -> Rows:
    """The rows of a Parquet file, with the columns that `choose` selects by their names (None: all).

    Raises UserError, with `setting`, if the file is not Parquet, and what `choose` raises.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with text_files.opened(path) as file:
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
