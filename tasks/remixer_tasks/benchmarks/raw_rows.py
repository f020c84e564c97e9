"""Reads the rows of published datasets: JSON lines, TSV, CSV and SQuAD's JSON.

An unreadable record raises UserError with its file and line, because metrics on incomplete data are not comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_tasks.benchmarks.prompts import UNLABELLED
from remixer_tasks.files import row_files, text_lines
from remixer_tasks.files.text_lines import BadRecords

_FILE_ADVICE = 'set DATA_DIR to the folder that contains the published files'
_LINE_ADVICE = 'correct the line, or download the file again'
_STRICT = BadRecords(True, _FILE_ADVICE, _LINE_ADVICE)


Row = dict[str, Any]
# Maps the path of a file to its rows, and the 1-based number of each row's first line.
RowReader = Callable[[str], Iterator[tuple[int, Row]]]


def build_row_error(path: str, number: int, reason: str) -> UserError:
    """Returns the error for an unusable row that starts on line `number`."""
    return UserError(f'{path}:{number}: {" ".join(reason.split()):.300}; {_LINE_ADVICE}')


def parse_rows(read: RowReader, parse: Callable[[Row], Iterable[Row]], *paths: str) -> Iterator[Row]:
    """Yields the examples that `parse` creates from each row of the files. Raises UserError for an unusable row."""
    for path in paths:
        for number, row in read(path):
            try:
                yield from parse(row)
            except (LookupError, TypeError, ValueError) as error:
                reason = f'the field {error} is missing' if isinstance(error, KeyError) else str(error)
                raise build_row_error(path, number, reason) from error


def get_texts(row: Row, columns: Iterable[str]) -> Row:
    """Returns the given columns of a row. Raises ValueError if a value is not a string."""
    texts = {column: row[column] for column in columns}
    for column, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f'the field {column!r} must be a string, got {text!r:.60}')
    return texts


def parse_label(value: Any, names: Sequence[str]) -> int:
    """Returns the class id of a label (a name, JSON boolean or id), or UNLABELLED if it is None."""
    if value is None:
        return UNLABELLED
    if str(value) in names:
        return names.index(str(value))
    if not isinstance(value, bool) and str(value) in map(str, range(len(names))):
        return int(value)
    raise ValueError(f'the label must be one of {", ".join(names)}, got {str(value)!r}')


def read_jsonl(path: str) -> Iterator[tuple[int, Row]]:
    """Yields (line number, object) for each line; blank lines are skipped."""
    return row_files.read_json_rows(path, _STRICT)


def read_tsv(path: str, columns: Sequence[str] | None = None, skip_short: bool = False) -> Iterator[tuple[int, Row]]:
    """Yields (line number, row) for each row of a tab-separated file; quotes are ordinary characters.

    If `columns` is None, the first line contains the column names. If `skip_short` is True, rows with missing cells are
    skipped, as in TFDS.
    """
    for number, line in read_lines(path):
        cells = line.split('\t')
        if columns is None:
            columns = cells
        elif len(cells) >= len(columns):
            yield number, dict(zip(columns, cells, strict=False))
        elif not skip_short and line:
            raise build_row_error(path, number, f'{len(cells)} columns instead of {len(columns)}')


def read_csv(path: str) -> Iterator[tuple[int, Row]]:
    """Yields (line number, row) for each row after the header line; quoted cells may contain line breaks."""
    return row_files.read_rows(path, row_files.RowLayout('csv'), _STRICT)


def parse_json_file(path: str) -> Any:
    """Parses a whole file as a single JSON value."""
    with text_lines.open_bytes(path, _FILE_ADVICE) as file:
        content = file.read()
    try:
        return untrusted_files.parse_json(content)
    except untrusted_files.InvalidJsonError as error:
        raise build_row_error(path, 1, str(error)) from error


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, line) for each line, without line ends and without a byte order mark."""
    return text_lines.read_valid_lines(path, _STRICT)
