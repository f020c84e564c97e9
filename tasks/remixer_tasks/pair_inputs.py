"""Reads the input texts of inference: lines, a field of JSON lines, or rows with the template used for finetuning."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

from remixer_t5x.errors import UserError, to_one_line
from remixer_tasks.files import row_files
from remixer_tasks.files.row_files import BadRecords
from remixer_tasks.text_pairs import TextTemplate


@dataclasses.dataclass(frozen=True)
class TextInputs:
    """Iterates over texts. A file can be read repeatedly, but standard input only once.

    Attributes:
        path: a file, possibly gzipped (`.gz`), or '-' for standard input.
        field: the name of the JSON field that contains the text.
        format: 'txt' (one text per line, including empty lines) or 'jsonl'; None uses the file extension, with 'txt' as
            the default. The rows of 'csv', 'tsv' and 'parquet' files require a template (`fill_template`).

    Raises UserError if the file cannot be read, if it is a table (csv, tsv or parquet), or if a line is not JSON or
    lacks the field.
    """

    path: str = '-'
    field: str = 'text'
    format: str | None = None

    def __post_init__(self) -> None:
        if self.format not in (None, 'txt', *row_files.FORMATS):
            known = ', '.join(map(repr, ('txt', *row_files.FORMATS)))
            raise UserError(f'INPUT_FORMAT must be {known} or None, got {self.format!r}')

    @property
    def is_stdin(self) -> bool:
        return self.path == '-'

    @property
    def display_name(self) -> str:
        return row_files.STDIN if self.is_stdin else self.path

    def detect_format(self) -> str:
        """Returns the format: 'txt', or one of `row_files.FORMATS`."""
        extension = os.path.splitext(self.path.lower().removesuffix('.gz'))[1]
        return self.format or row_files.EXTENSIONS.get(extension.removeprefix('.'), 'txt')

    def __iter__(self) -> Iterator[str]:
        format, path = self.detect_format(), row_files.STDIN if self.is_stdin else os.path.expanduser(self.path)
        if format not in ('txt', 'jsonl'):
            raise UserError(
                f'{self.display_name} is a table, which requires a template; set INPUTS as in finetuning, for example '
                "--gin.INPUTS='question: {question}', or pass --gin.INPUT_FORMAT=txt to read its lines"
            )
        file_advice = 'pass --input=FILE, or --input=- for a pipe'
        malformed = BadRecords(True, file_advice, 'correct the line, or pass --field or --gin.INPUT_FORMAT=txt')
        if format == 'txt':
            for _, line in row_files.read_valid_lines(path, row_files.MAX_CHARACTERS, malformed):
                yield line
            return
        for number, row in row_files.read_json_rows(path, row_files.MAX_CHARACTERS, malformed):
            if not isinstance(row.get(self.field), str):
                names = to_one_line(', '.join(row)[:200])
                malformed.add_malformed_record(path, number, f'field {self.field!r} is not a string in {names}')
            yield row[self.field]


def fill_template(
    lines: TextInputs,
    template: str | None,
    delimiter: str | None = None,
    encoding: str = 'utf-8',
    targets: str | None = None,
) -> TextInputs | RowTexts:
    """Returns the input texts: `template` filled with each row of a file, or `lines` unchanged.

    `lines` is returned if `template` is None, or if it is a single column and the input is plain text. Each line is
    then an input text. Other templates require rows, and raise UserError for plain text.

    Args:
        lines: the input file or standard input.
        template: the template, or None if the lines are complete texts.
        delimiter: delimiter of columns in TSV and CSV files; None uses a tab or a comma.
        encoding: text encoding of the file.
        targets: the targets' template in finetuning, if any. As in finetuning, columns of TSV and CSV files are
            numbered only if all columns of both templates are numbers.
    """
    if template is None:
        return lines
    format = lines.detect_format()
    row_template = TextTemplate(template, 'INPUTS')
    if format != 'txt':
        if lines.is_stdin:
            raise UserError(f'rows for INPUTS = {template!r} must be in a file, got standard input; pass --input=FILE')
        if lines.field != TextInputs.field:
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

    lines: TextInputs
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
            except ValueError as error:
                malformed.add_malformed_record(self.display_name, number, str(error))
