"""The rows of a user's files as the inputs that a model was finetuned on: the same columns in the same template."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

from remixer_t5x.errors import UserError
from remixer_tasks.files import row_files
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.pair_templates import Template, UnusableRow

AS_THEY_ARE = 'or, for texts that are filled in already, --gin.INPUT_TEMPLATE=None'


def texts(lines: Any, template: str | None, delimiter: str | None = None, encoding: str = 'utf-8') -> Any:
    """`lines` (a `text_inputs.TextInputs`), or, with the template INPUTS of `local_pairs.corpus`, the rows of its file.

    A template that is a single column adds nothing to a text, so lines of a file or of standard input are its texts as
    they are. Any other template needs rows; raises UserError for lines.
    """
    if template is None:
        return lines
    made, format = Template(template, 'INPUTS'), _format(lines)
    if format is not None:
        numbered = all(name.isdecimal() for name in made.columns)
        layout = row_files.RowLayout(format, delimiter=delimiter, encoding=encoding, numbered=numbered)
        return RowTexts(lines, made, layout)
    if set(template) & set('{}') and not re.fullmatch(r'\{[^{}]+\}', template):
        columns = ' and '.join(dict.fromkeys(made.columns)) or 'any'
        raise UserError(
            f'INPUTS is {template!r}, and {lines.shown} has lines of text; give rows with the column {columns}, as in '
            f'--input=rows.csv (CSV, TSV, JSON lines, Parquet), {AS_THEY_ARE}'
        )
    return lines


def _format(lines: Any) -> str | None:
    """The format of a file of rows; None for lines of text and for standard input."""
    if lines.format is not None:
        return None if lines.format == 'txt' else lines.format
    if lines.is_stdin:
        return None
    name = os.path.basename(lines.path.lower().removesuffix('.gz'))
    return row_files.EXTENSIONS.get(name.rpartition('.')[2] if '.' in name else '')


@dataclasses.dataclass(frozen=True)
class RowTexts:
    """Iterates over the template's text for each row of the file of `lines`, any number of times.

    Raises UserError, with the line, for a row that cannot be read or lacks a value: predictions belong to rows by their
    number, so no row is skipped.
    """

    lines: Any
    template: Template
    layout: row_files.RowLayout

    def __post_init__(self) -> None:
        if self.lines.is_stdin:
            raise UserError('rows cannot be read from standard input; give a file, as in --input=rows.jsonl')
        if self.lines.field != 'text':
            raise UserError(
                f'--field is {self.lines.field!r} and INPUTS is {self.template.text!r}, which names the columns; leave '
                f'--field out, {AS_THEY_ARE}'
            )

    @property
    def path(self) -> str:
        return self.lines.path

    @property
    def shown(self) -> str:
        return self.lines.shown

    @property
    def is_stdin(self) -> bool:
        return False

    def __iter__(self) -> Iterator[str]:
        path = os.path.expanduser(self.lines.path)
        for number, row in row_files.read(path, self.layout, _Every()):
            try:
                yield self.template.fill(row)
            except UnusableRow as error:
                if not set(self.template.columns) <= set(row):
                    raise self.template.no_column(row) from error
                raise UserError(f'{self.shown} line {number}: {error}; correct the row or leave it out') from error


class _Every(Malformed):
    """Refuses the first row that cannot be read."""

    file_advice = 'correct --input or the file'

    def __init__(self) -> None:
        super().__init__(strict=True)

    def record(self, path: str, line: int, reason: str) -> None:
        raise UserError(f'{path} line {line}: {reason}; correct the row or leave it out')

    def empty(self, path: str, line: int) -> None:
        self.record(path, line, 'the text is empty')
