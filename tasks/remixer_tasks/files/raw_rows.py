"""Rows of the raw files that data sets are published as: JSON lines, TSV, CSV and SQuAD's JSON.

A reader yields (number, row) with `number` the line that the row starts on, from 1. A record that cannot be read raises
UserError with file and line: metrics of a labelled data set without some rows compare with nobody's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError
from remixer_tasks.files import row_files, text_files
from remixer_tasks.files.malformed import Malformed

# A whole file that is one JSON text; the largest published one has 42 MB.
MAX_JSON_BYTES = 10**9
_REASON = 300
Row = Mapping[str, Any]
Rows = Iterator[tuple[int, Row]]


def bad(path: str, number: int, reason: str) -> UserError:
    """The error for a row that cannot be used."""
    shown = reason if len(reason) <= _REASON else f'{reason[:_REASON]}...'
    return UserError(f'{path}:{number}: {" ".join(shown.split())}; correct the line, or download the file again')


class _Refused(Malformed):
    """Refuses every malformed record: the published files have none."""

    file_advice = 'set DATA_DIR to the folder that holds the raw files'

    def record(self, path: str, line: int, reason: str) -> NoReturn:
        raise bad(path, line, reason)


_REFUSED = _Refused(strict=True)


def jsonl(path: str) -> Rows:
    """JSON objects, one per line; blank lines are skipped."""
    return row_files.json_rows(path, text_files.LONGEST, _REFUSED)


def tsv(path: str, columns: Sequence[str] | None = None, skip_short: bool = False) -> Rows:
    """Cells between tabs, quotes being ordinary characters. columns: their names; None takes them from the first line.

    skip_short: rows with missing cells are left out, as TFDS does, for files that are published with such rows.
    """
    for number, line in lines(path):
        cells = line.split('\t')
        if columns is None:
            columns = cells
        elif len(cells) >= len(columns):
            yield number, dict(zip(columns, cells, strict=False))
        elif not skip_short and line:
            raise bad(path, number, f'{len(cells)} columns instead of {len(columns)}')


def comma_separated(path: str) -> Rows:
    """CSV with a header line and quotes, in which a cell may contain line ends."""
    return row_files.read(path, row_files.RowLayout('csv'), _REFUSED)


def whole_json(path: str) -> Any:
    """The value in a file that is one JSON text."""
    with text_files.opened(path, _Refused.file_advice) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise bad(path, 1, f'the file has more than {MAX_JSON_BYTES:,} bytes')
    try:
        return untrusted_files.parse(content)
    except untrusted_files.NotJson as error:
        raise bad(path, 1, str(error)) from error


def lines(path: str) -> Iterator[tuple[int, str]]:
    """(number, line without its end); a byte order mark is dropped."""
    return text_files.lines(path, text_files.LONGEST, _REFUSED)
