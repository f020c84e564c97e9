"""Reads the rows of published data sets: JSON lines, TSV, CSV and SQuAD's JSON.

An unreadable record raises UserError with its file and line, because metrics on incomplete data are not comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks.prompts import UNLABELLED
from remixer_tasks.files import row_files
from remixer_tasks.files.row_files import BadRecords

_FILE_ADVICE = 'set DATA_DIR to the folder that contains the published files'
_LINE_ADVICE = 'correct the line, or download the file again'
_STRICT = BadRecords(True, _FILE_ADVICE, _LINE_ADVICE)


def build_row_error(path: str, number: int, reason: str) -> UserError:
    """Returns the error for an unusable row that starts on line `number`."""
    return UserError(f'{path}:{number}: {" ".join(reason.split()):.300}; {_LINE_ADVICE}')


class RawRow(dict[str, Any]):
    """The fields of a row, or of a JSON object within a row.

    `number` is the 1-based number of the row's first line. Error messages contain `place`, the path of the object
    within the row, as in 'questions 0 answers 3: '.
    """

    def __init__(self, values: Mapping[str, Any], path: str, number: int, place: str = ''):
        super().__init__(values)
        self.path, self.number, self.place = path, number, place

    def build_error(self, reason: str) -> UserError:
        return build_row_error(self.path, self.number, f'{self.place}{reason}')

    def parse_text(self, column: str) -> str:
        if not isinstance(self.get(column), str):
            raise self.build_error(f'the field {column!r} is missing or not a string')
        return self[column]

    def parse_texts(self, columns: Iterable[str]) -> dict[str, Any]:
        return {column: self.parse_text(column) for column in columns}

    def parse_integer(self, column: str) -> int:
        try:
            return int(self[column])
        except (KeyError, TypeError, ValueError) as error:
            raise self.build_error(f'the field {column!r} is missing or not an integer') from error

    def parse_label(self, names: Sequence[str], column: str = 'label') -> int:
        """Returns the class id of a label (a name, JSON boolean or id), or UNLABELLED if the column is missing."""
        value = self.get(column)
        if value is None:
            return UNLABELLED
        text = str(value)
        if text in names:
            return names.index(text)
        if not isinstance(value, bool) and text in map(str, range(len(names))):
            return int(text)
        raise self.build_error(f'the label must be one of {", ".join(names)}, got {text!r}')

    def parse_object(self, column: str) -> RawRow:
        if not isinstance(self.get(column), dict):
            raise self.build_error(f'the field {column!r} is missing or not a JSON object')
        return RawRow(self[column], self.path, self.number, self.place)

    def parse_objects(self, column: str) -> list[RawRow]:
        values = self.get(column)
        if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
            raise self.build_error(f'the field {column!r} is missing or not a list of JSON objects')
        start = self.place.replace(':', '')
        return [
            RawRow(value, self.path, self.number, f'{start}{column} {index}: ') for index, value in enumerate(values)
        ]


Rows = Iterator[RawRow]
RowReader = Callable[..., Rows]


def read_jsonl(path: str) -> Rows:
    """Yields JSON objects, one per line; blank lines are skipped."""
    return (
        RawRow(row, path, number) for number, row in row_files.read_json_rows(path, row_files.MAX_CHARACTERS, _STRICT)
    )


def read_tsv(path: str, columns: Sequence[str] | None = None, skip_short: bool = False) -> Rows:
    """Yields the rows of a tab-separated file; quotes are ordinary characters.

    If `columns` is None, the first line contains the column names. If `skip_short` is True, rows with missing cells are
    skipped, as in TFDS.
    """
    for number, line in read_lines(path):
        cells = line.split('\t')
        if columns is None:
            columns = cells
        elif len(cells) >= len(columns):
            yield RawRow(dict(zip(columns, cells, strict=False)), path, number)
        elif not skip_short and line:
            raise build_row_error(path, number, f'{len(cells)} columns instead of {len(columns)}')


def read_csv(path: str) -> Rows:
    """Yields the rows of a CSV file with a header line; quoted cells may contain line breaks."""
    return (RawRow(row, path, number) for number, row in row_files.read_rows(path, row_files.RowLayout('csv'), _STRICT))


def parse_json_file(path: str) -> Any:
    """Parses a whole file as a single JSON value."""
    with row_files.open_bytes(path, _FILE_ADVICE) as file:
        content = file.read()
    try:
        return untrusted_files.parse_json(content)
    except untrusted_files.InvalidJsonError as error:
        raise build_row_error(path, 1, str(error)) from error


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, line) for each line, without line ends and without a byte order mark."""
    return row_files.read_valid_lines(path, row_files.MAX_CHARACTERS, _STRICT)
