"""Reads the input texts of inference: lines, a field of JSON lines, or rows with the template used for finetuning."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator

from remixer_t5x.errors import UserError, to_one_line
from remixer_tasks.files import row_files, text_lines
from remixer_tasks.files.text_lines import BadRecords
from remixer_tasks.text_pairs import TextTemplate


@dataclasses.dataclass(frozen=True)
class TextInputs:
    """Iterates over texts. A file can be read repeatedly, but standard input only once.

    Predictions are matched to texts by number, so an invalid line or row raises UserError instead of being skipped.

    Attributes:
        path: a file, possibly gzipped (`.gz`), or '-' for standard input.
        field: the name of the JSON field that contains the text if `template` is None.
        format: 'txt' (one text per line, including empty lines) or one of `row_files.FORMATS`; None uses the file
            extension, with 'txt' as the default.
        template: a template to fill with each row of the file; None if the lines are complete texts, which requires
            'txt' or 'jsonl'. Each line of a 'txt' file is a text if the template is a single column; other templates
            raise UserError for such files.
        targets: the targets' template in finetuning, if any. As in finetuning, columns of TSV and CSV files are
            numbered only if all columns of both templates are numbers.
        delimiter: delimiter of columns in TSV and CSV files; None uses a tab or a comma.
        encoding: text encoding of the rows.
    """

    path: str = '-'
    field: str = 'text'
    format: str | None = None
    template: str | None = None
    targets: str | None = None
    delimiter: str | None = None
    encoding: str = 'utf-8'

    def __post_init__(self) -> None:
        if self.format not in (None, 'txt', *row_files.FORMATS):
            known = ', '.join(map(repr, ('txt', *row_files.FORMATS)))
            raise UserError(f'INPUT_FORMAT must be {known} or None, got {self.format!r}')
        if self.template is None:
            return
        row_template = TextTemplate(self.template, 'INPUTS')
        if self._detect_format() == 'txt':
            if set(self.template) & set('{}') and not re.fullmatch(r'\{[^{}]+\}', self.template):
                columns = ' and '.join(dict.fromkeys(row_template.columns)) or 'any'
                raise UserError(
                    f'INPUTS is {self.template!r}, so {self.display_name} must have rows with the column {columns}, '
                    'got lines of text; pass --input=rows.csv (CSV, TSV, JSON lines, Parquet), or, for complete input '
                    'texts, --gin.INPUT_TEMPLATE=None'
                )
        elif self.is_stdin:
            raise UserError(
                f'rows for INPUTS = {self.template!r} must be in a file, got standard input; pass --input=FILE'
            )
        elif self.field != TextInputs.field:
            raise UserError(
                f'INPUT_FIELD (--field) must be omitted with INPUTS = {self.template!r}, got {self.field!r}; pass '
                f"--gin.INPUT_TEMPLATE='{{{self.field}}}' to read this column"
            )

    @property
    def is_stdin(self) -> bool:
        return self.path == '-'

    @property
    def display_name(self) -> str:
        return text_lines.STDIN if self.is_stdin else self.path

    def _detect_format(self) -> str:
        extension = os.path.splitext(self.path.lower().removesuffix('.gz'))[1]
        return self.format or row_files.EXTENSIONS.get(extension.removeprefix('.'), 'txt')

    def __iter__(self) -> Iterator[str]:
        format, path = self._detect_format(), text_lines.STDIN if self.is_stdin else os.path.expanduser(self.path)
        if self.template is not None and format != 'txt':
            yield from self._fill_template(path, format, self.template)
            return
        if format not in ('txt', 'jsonl'):
            raise UserError(
                f'{self.display_name} is a table, which requires a template; set INPUTS as in finetuning, for example '
                "--gin.INPUTS='question: {question}', or pass --gin.INPUT_FORMAT=txt to read its lines"
            )
        file_advice = 'pass --input=FILE, or --input=- for a pipe'
        malformed = BadRecords(True, file_advice, 'correct the line, or pass --field or --gin.INPUT_FORMAT=txt')
        if format == 'txt':
            for _, line in text_lines.read_valid_lines(path, malformed):
                yield line
            return
        for number, row in row_files.read_json_rows(path, malformed):
            if not isinstance(row.get(self.field), str):
                names = to_one_line(', '.join(row)[:200])
                malformed.add_malformed_record(path, number, f'field {self.field!r} is not a string in {names}')
            yield row[self.field]

    def _fill_template(self, path: str, format: str, text: str) -> Iterator[str]:
        template = TextTemplate(text, 'INPUTS')
        numbered = template.has_numbered_columns and (
            self.targets is None or TextTemplate(self.targets, 'TARGETS').has_numbered_columns
        )
        layout = row_files.RowLayout(format, delimiter=self.delimiter, encoding=self.encoding, numbered=numbered)
        malformed = BadRecords(True, 'correct --input or the file', 'correct the row or INPUTS')
        for number, row in row_files.read_rows_with_columns(path, layout, malformed, {'INPUTS': template.columns}):
            try:
                yield template.fill_from_row(row)
            except ValueError as error:
                malformed.add_malformed_record(self.display_name, number, str(error))
