"""Converts the rows of a file to inputs for inference, with the template used for finetuning."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

from remixer_t5x.errors import UserError
from remixer_tasks.files import row_files
from remixer_tasks.files.row_files import BadRecords
from remixer_tasks.text_pairs import MissingColumnError, TextTemplate


def fill_template(
    lines: Any,
    template: str | None,
    delimiter: str | None = None,
    encoding: str = 'utf-8',
    targets: str | None = None,
) -> Any:
    """Returns the input texts: `template` filled with each row of a file, or `lines` unchanged.

    `lines` is returned if `template` is None, or if it is a single column and the input is plain text. Each line is
    then an input text. Other templates require rows, and raise UserError for plain text.

    Args:
        lines: the input file or standard input, as a `text_inputs.TextInputs`.
        template: the template, or None if the lines are complete texts.
        delimiter: delimiter of columns in TSV and CSV files; None uses a tab or a comma.
        encoding: text encoding of the file.
        targets: the targets' template in finetuning, if any. As in finetuning, columns of TSV and CSV files are
            numbered only if all columns of both templates are numbers.
    """
    if template is None:
        return lines
    format = lines.format
    if format is None and not lines.is_stdin:
        format = row_files.EXTENSIONS.get(os.path.basename(lines.path.lower().removesuffix('.gz')).rpartition('.')[2])
    row_template = TextTemplate(template, 'INPUTS')
    if format not in (None, 'txt'):
        if lines.is_stdin:
            raise UserError(f'rows for INPUTS = {template!r} must be in a file, got standard input; pass --input=FILE')
        if lines.field != type(lines).field:
            raise UserError(
                f'INPUT_FIELD (--field) must be omitted with INPUTS = {template!r}, got {lines.field!r}; pass '
                f"--gin.INPUT_TEMPLATE='{{{lines.field}}}' to read this column"
            )
        numbered = row_template.has_numbered_columns and (
            targets is None or TextTemplate(targets, 'TARGETS').has_numbered_columns
        )
        layout = row_files.RowLayout(format, delimiter=delimiter, encoding=encoding, numbered=numbered)
        return RowTexts(lines, row_template, layout)
    if set(template) & set('{}') and not re.fullmatch(r'\{[^{}]+\}', template):
        columns = ' and '.join(dict.fromkeys(row_template.columns)) or 'any'
        raise UserError(
            f'INPUTS is {template!r}, so {lines.display_name} must have rows with the column {columns}, got lines of '
            f'text; pass --input=rows.csv (CSV, TSV, JSON lines, Parquet), or, for complete input texts, '
            '--gin.INPUT_TEMPLATE=None'
        )
    return lines


@dataclasses.dataclass(frozen=True)
class RowTexts:
    """A re-iterable collection of input texts, built by filling the template with each row of the input file.

    Predictions are matched to rows by row number, so an invalid row raises UserError instead of being skipped.
    """

    lines: Any
    template: TextTemplate
    layout: row_files.RowLayout
    is_stdin = False

    @property
    def path(self) -> str:
        return self.lines.path

    @property
    def display_name(self) -> str:
        return self.lines.display_name

    def __iter__(self) -> Iterator[str]:
        malformed = BadRecords(True, 'correct --input or the file', 'correct or remove the row')
        for number, row in row_files.read_rows(os.path.expanduser(self.lines.path), self.layout, malformed):
            try:
                yield self.template.fill_from_row(row)
            except MissingColumnError as error:
                # In all formats except JSON lines, all rows have the same columns.
                data = f'{self.display_name} line {number}' if self.layout.format == 'jsonl' else 'the data'
                raise self.template.build_missing_column_error(row, data) from error
            except ValueError as error:
                malformed.add_malformed_record(self.display_name, number, str(error))
