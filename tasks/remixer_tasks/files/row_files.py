"""Reads rows from JSON lines, TSV, CSV and Parquet files."""

from __future__ import annotations

import collections
import csv
import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError, suggest_similar_name
from remixer_tasks.files.text_lines import MAX_CHARACTERS, BadRecords, open_bytes, read_valid_lines

FORMATS = ('jsonl', 'tsv', 'csv', 'parquet')
EXTENSIONS = {'json': 'jsonl', 'ndjson': 'jsonl', **{name: name for name in FORMATS}}
# File extensions of compressed files. `open_bytes` decompresses only gzip, and `datasets` all of them.
COMPRESSIONS = ('.gz', '.bz2', '.xz', '.zst', '.lz4', '.zip')
Row = dict[str, Any]
# Iterator over (number, row) pairs, where `number` is the 1-based line or row number.
Rows = Iterator[tuple[int, Row]]
# Limits the cells of all CSV readers of this process, because an unclosed quote extends a cell to the end of the file.
csv.field_size_limit(MAX_CHARACTERS)


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Settings that determine how files are parsed into rows.

    Attributes:
        format: one of FORMATS; None detects the format from each file's extension.
        delimiter: column delimiter of TSV and CSV; None uses a tab for TSV and a comma for CSV.
        encoding: text encoding of JSON lines, TSV and CSV files.
        numbered: whether TSV and CSV files have no header line; their columns are then named 0, 1, 2, ...
    """

    format: str | None = None
    delimiter: str | None = None
    encoding: str = 'utf-8'
    numbered: bool = False

    def __post_init__(self):
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise UserError(
                f'DELIMITER must be one character or None, got {self.delimiter!r}; for a tab, pass '
                '--gin.DELIMITER="\'\\t\'"'
            )
        try:
            ''.encode(self.encoding)
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(
                f"ENCODING must be a text encoding such as 'latin-1', got {self.encoding!r} ({error})"
            ) from error

    def detect_format(self, path: str) -> str:
        """Returns the format of the file `path`. Raises UserError for an unknown format."""
        return choose_format(path, self.format, EXTENSIONS, 'PAIRS_FORMAT')


def choose_format(path: str, format: str | None, formats: Mapping[str, str], setting: str) -> str:
    """Returns `format`, or the format for the file's extension, ignoring .gz, if it is None.

    `setting` is the macro of `format`; an empty string if the command has none. Raises UserError for a format that is
    not among the values of `formats`, for an unknown extension, and for other compressions than gzip, whose bytes may
    be valid lines.
    """
    name = path.lower().removesuffix('.gz')
    if name.endswith(COMPRESSIONS):
        raise UserError(f'{path} must be uncompressed or gzipped; decompress it')
    chosen = formats.get(name.rpartition('.')[2]) if format is None else format
    if chosen is None or chosen not in formats.values():
        allowed = ', '.join(dict.fromkeys(formats.values()))
        if not setting:
            raise UserError(f'{path}: unknown extension; convert it to one of {allowed}')
        problem = 'extension; rename it, or' if format is None else f'{setting} {format!r};'
        raise UserError(f'{path}: unknown {problem} set {setting} to one of {allowed}')
    return chosen


def add_nested_columns(row: Row) -> Row:
    """Adds a column `outer.inner` for each item of an object, such as `translation.en`, except in SQuAD's answers."""
    objects = {name: value for name, value in row.items() if isinstance(value, dict) and 'answer_start' not in value}
    nested = {f'{name}.{key}': value for name, items in objects.items() for key, value in items.items()}
    return {**nested, **row} if nested else row


def check_columns_exist(columns: Mapping[str, Sequence[str]], row: Row, data: str = 'the data') -> None:
    """Raises UserError if a column of a setting is not a column of `row`; `columns` maps each setting to its columns.

    An item of a column without a value, such as `translation.en` if `translation` is None, counts as a column.
    """
    for setting, names in columns.items():
        if missing := [name for name in names if name not in row and row.get(name.rpartition('.')[0], '') is not None]:
            shown = ', '.join(ascii(name)[:60] for name in [*row][:20]) + (', ...' if len(row) > 20 else '')
            is_unsplit = len(row) == 1 and re.search(r'[,;|\t]', [*row][0])
            similar = suggest_similar_name(missing[0], map(ascii, row), lambda name: name.strip('\'" '))
            hint = '; check the delimiter (DELIMITER of PAIRS)' if is_unsplit else similar
            raise UserError(f'{setting} must use columns of {data} ({shown}), got {missing[0]!r}{hint}')


def read_rows_with_columns(
    path: str, layout: RowLayout, malformed: BadRecords, columns: Mapping[str, Sequence[str]]
) -> Rows:
    """Yields the rows of one file. Raises UserError if a column of a setting does not exist.

    `columns` maps each setting to its columns. Rows of JSON lines may lack a column, but all rows of other files have
    the same columns. The rows of a Parquet file contain only these columns.
    """
    names = {name for group in columns.values() for name in group}
    is_jsonl = layout.detect_format(path) == 'jsonl'
    merged: Row = {}
    for number, row in read_rows(path, layout, malformed, names):
        if not names <= merged.keys():
            merged.update(row)
            if not is_jsonl:
                check_columns_exist(columns, merged, path)
        yield number, row
    if merged:
        check_columns_exist(columns, merged, path)


def read_rows(path: str, layout: RowLayout, malformed: BadRecords, columns: Collection[str] = ()) -> Rows:
    """Returns an iterator over the rows of one file. Raises UserError if the whole file is unusable.

    If a Parquet file has all `columns`, its rows contain only these.
    """
    format = layout.detect_format(path)
    if format == 'parquet':
        rows = _read_parquet_rows(path, columns)
    elif format == 'jsonl':
        rows = read_json_rows(path, malformed, layout.encoding)
    else:
        cells = (_read_csv_cells if format == 'csv' else _read_tsv_cells)(path, layout, malformed)
        return _convert_cells_to_rows(path, cells, layout, malformed)
    return ((number, add_nested_columns(row)) for number, row in rows)


def read_json_rows(path: str, malformed: BadRecords, encoding: str = 'utf-8') -> Rows:
    """Yields (line number, object) from a JSON lines file; blank lines are skipped."""
    is_first = True
    for number, line in read_valid_lines(path, malformed, encoding):
        if not line.strip():
            continue
        try:
            # Some programs write NaN for missing values.
            row, problem = untrusted_files.parse_json(line, odd_numbers=True), 'the line is not a JSON object'
        except untrusted_files.InvalidJsonError as error:
            row, problem = None, str(error)
        if isinstance(row, dict):
            yield number, row
        elif is_first and (line.lstrip().startswith('[') or line.strip() == '{'):
            command = "jq -c '.[]'" if '[' in line else 'jq -c .'
            raise UserError(f'{path} must have one JSON object on each line; run {command} FILE > FILE.jsonl')
        else:
            malformed.add_malformed_record(path, number, problem)
        is_first = False


def _read_tsv_cells(path: str, layout: RowLayout, malformed: BadRecords) -> Iterator[tuple[int, list[str]]]:
    for number, line in read_valid_lines(path, malformed, layout.encoding):
        yield number, line.split(layout.delimiter or '\t') if line else []


def _read_csv_cells(path: str, layout: RowLayout, malformed: BadRecords) -> Iterator[tuple[int, list[str]]]:
    """Reads CSV as in RFC 4180: quoted cells may contain commas, quotes and line breaks."""
    # The current row's first and last line number, and the number of malformed lines before this row.
    first = last = skipped = 0

    def read_lines() -> Iterator[str]:
        nonlocal first, last, skipped
        for number, line in read_valid_lines(path, malformed, layout.encoding):
            if not first:
                first, skipped = number, malformed.count
            last = number
            yield f'{line}\n'

    # With strict=False, an unclosed quote would turn the rest of the file into one cell.
    reader = csv.reader(read_lines(), delimiter=layout.delimiter or ',', strict=True)
    while True:
        first = 0
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if last > first or 'unexpected end' in str(error) or 'field larger' in str(error):
                raise UserError(
                    f'{path} line {first}: a quoted cell that starts here is never closed ({error}); correct the line'
                ) from error
            malformed.add_malformed_record(path, last, f'invalid CSV ({error})')
            continue
        # A row that contains a malformed line is incomplete.
        if malformed.count == skipped:
            yield last, cells


def _convert_cells_to_rows(
    path: str, cells: Iterator[tuple[int, list[str]]], layout: RowLayout, malformed: BadRecords
) -> Rows:
    """Converts rows of cells to dicts, keyed by the column names in the first line, or by column numbers.

    A blank line between two rows is malformed; blank lines at the start or end of a file are skipped.
    """
    skipped = malformed.count
    number, names = next((row for row in cells if row[1]), (0, []))
    first = []
    if layout.numbered:
        first, names = [(number, names)], [str(column) for column in range(len(names))]
    elif malformed.count > skipped:
        raise UserError(
            f'{path}: the line of column names cannot be read{malformed.describe_skipped_records()}; correct it, '
            "convert the file to UTF-8, or set the encoding of PAIRS, as in ENCODING = 'latin-1'"
        )
    _check_distinct_names(path, names)
    blank = 0
    for number, row in itertools.chain(first, cells):
        if not row:
            blank = blank or number
            continue
        if blank:
            malformed.add_malformed_record(path, blank, 'a blank line')
            blank = 0
        if len(row) == len(names):
            yield number, dict(zip(names, row, strict=True))
        else:
            malformed.add_malformed_record(path, number, f'{len(row)} columns, the first line has {len(names)}')


def _check_distinct_names(path: str, names: Sequence[str]) -> None:
    if duplicates := sorted(name for name, count in collections.Counter(names).items() if count > 1):
        raise UserError(f'the columns of {path} must have different names, got {duplicates[0]!a:.60} twice; rename one')


def _read_parquet_rows(path: str, columns: Collection[str]) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_bytes(path, 'correct the file, or set its format') as file:
        try:
            # Parquet is read from the end of the file, so a gzipped file is decompressed first.
            table = pq.ParquetFile(pa.BufferReader(file.read()) if path.lower().endswith('.gz') else file)
            _check_distinct_names(path, table.schema_arrow.names)
            has_columns = columns and set(columns) <= set(table.schema_arrow.names)
            batches = table.iter_batches(batch_size=1024, columns=sorted(columns) if has_columns else None)
            yield from enumerate((row for batch in batches for row in _list_rows(batch)), 1)
        except pa.ArrowException as error:
            raise UserError(
                f'{path} is not a Parquet file ({" ".join(str(error).split())}); write it again, or set its format'
            ) from error


def _list_rows(batch: Any) -> list[Row]:
    """Converts a record batch to rows. A float32 number has its shortest text: 0.1, not 0.10000000149011612."""
    import pyarrow as pa

    def replace_float32(type: Any, by: Any) -> Any:
        if pa.types.is_struct(type):
            return pa.struct([field.with_type(replace_float32(field.type, by)) for field in type])
        return by if pa.types.is_float32(type) else type

    columns = [
        column.cast(replace_float32(column.type, pa.string())).cast(replace_float32(column.type, pa.float64()))
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()
