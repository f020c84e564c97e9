"""Labels of raw rows as class ids."""

from collections.abc import Sequence

from remixer_tasks.benchmarks.sources.dataset import UNLABELLED
from remixer_tasks.files.raw_rows import Row, bad


def of_row(row: Row, column: str, names: Sequence[str], path: str, number: int) -> int:
    """The id of the row's label: a name, a JSON boolean (for False and True), or the id itself as number or digits.

    UNLABELLED where there is no such column. Raises UserError, with file and line, for any other label.
    """
    value = row.get(column)
    if value is None:
        return UNLABELLED
    text = str(value)
    if text in names:
        return names.index(text)
    if not isinstance(value, bool) and text in map(str, range(len(names))):
        return int(text)
    raise bad(path, number, f'unknown label {text!r}, allowed are {", ".join(names)}')


def cell(row: Row, column: str, path: str, number: int) -> str:
    """The text in a column. Raises UserError, with file and line, where there is none."""
    value = row.get(column)
    if not isinstance(value, str):
        raise bad(path, number, f'the field {column!r} is missing or not a text')
    return value
