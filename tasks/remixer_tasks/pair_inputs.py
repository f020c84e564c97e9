"""The rows of a user's file as inputs for inference, in the template that the model was finetuned on."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

from remixer_t5x.errors import UserError
from remixer_tasks.files import row_files
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.text_pairs import Template, UnusableRow

_AS_TEXT = 'or, for texts that are filled in already, --gin.INPUT_TEMPLATE=None'


def texts(lines: Any, template: str | None, delimiter: str | None = None, encoding: str = 'utf-8') -> Any:
    """`lines` (a `text_inputs.TextInputs`), or the rows of its file in the template INPUTS of `local_pairs.corpus`.

    A template that is a single column adds nothing to a text, so lines of a file or of standard input are texts. Any
    other template needs rows; raises UserError for lines.
    """
    if template is None:
        return lines
    format = lines.format
    if format is None and not lines.is_stdin:
        format = row_files.EXTENSIONS.get(os.path.basename(lines.path.lower().removesuffix('.gz')).rpartition('.')[2])
    row_template = Template(template, 'INPUTS')
    if format not in (None, 'txt'):
        numbered = all(name.isdecimal() for name in row_template.columns)
        layout = row_files.RowLayout(format, delimiter=delimiter, encoding=encoding, numbered=numbered)
        return RowTexts(lines, row_template, layout)
    if set(template) & set('{}') and not re.fullmatch(r'\{[^{}]+\}', template):
        columns = ' and '.join(dict.fromkeys(row_template.columns)) or 'any'
        raise UserError(
            f'INPUTS is {template!r}, and {lines.shown} has lines of text; give rows with the column {columns}, as in '
            f'--input=rows.csv (CSV, TSV, JSON lines, Parquet), {_AS_TEXT}'
        )
    return lines


@dataclasses.dataclass(frozen=True)
class RowTexts:
    """Iterates over the template's text for each row of the file of `lines`, any number of times.

    Raises UserError, with the line, for a row that cannot be read or lacks a value: predictions belong to rows by their
    number, so no row is skipped.
    """

    lines: Any
    template: Template
    layout: row_files.RowLayout
    is_stdin = False

    def __post_init__(self) -> None:
        if self.lines.is_stdin:
            raise UserError('rows cannot be read from standard input; give a file, as in --input=rows.jsonl')
        if self.lines.field != 'text':
            raise UserError(
                f'--field is {self.lines.field!r} and INPUTS is {self.template.text!r}, which names the columns; '
                f'remove --field, {_AS_TEXT}'
            )

    @property
    def path(self) -> str:
        return self.lines.path

    @property
    def shown(self) -> str:
        return self.lines.shown

    def __iter__(self) -> Iterator[str]:
        malformed = Malformed(True, 'correct --input or the file', 'correct or remove the row')
        for number, row in row_files.read(os.path.expanduser(self.lines.path), self.layout, malformed):
            try:
                yield self.template.fill(row)
            except UnusableRow as error:
                if not set(self.template.columns) <= set(row):
                    raise self.template.missing_column(row) from error
                malformed.record(self.shown, number, str(error))
