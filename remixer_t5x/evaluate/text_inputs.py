"""Reads texts for inference from the lines of a file or standard input, or from one field of JSON lines."""

import contextlib
import dataclasses
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator
from typing import TextIO

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError, root_cause_message, to_one_line

TXT, JSONL = 'txt', 'jsonl'
# File formats for tables, in which each row has several columns.
TABLE_FORMATS = ('csv', 'tsv', 'parquet')
# Maximum number of characters in a line; a longer line might not fit into memory.
MAX_LINE_CHARACTERS = 50_000_000
_FORMAT_BY_EXTENSION = {'.txt': TXT, '.jsonl': JSONL, '.ndjson': JSONL, '.json': JSONL}


@dataclasses.dataclass(frozen=True)
class TextInputs:
    """Iterates over texts. A file can be read repeatedly, but standard input only once.

    Attributes:
        path: a file, possibly gzipped (`.gz`), or '-' for standard input.
        field: the name of the JSON field that contains the text.
        format: 'txt' (one text per line, including empty lines) or 'jsonl'; None uses the file extension, with 'txt' as
            the default. The rows of 'csv', 'tsv' and 'parquet' files require a template (`remixer_tasks.pair_inputs`).

    Raises UserError if the file cannot be read, if it is a table (csv, tsv or parquet), or if a line is not JSON or
    lacks the field.
    """

    path: str = '-'
    field: str = 'text'
    format: str | None = None

    def __post_init__(self) -> None:
        if self.format not in (None, TXT, JSONL, *TABLE_FORMATS):
            known = ', '.join(map(repr, (TXT, JSONL, *TABLE_FORMATS)))
            raise UserError(f'INPUT_FORMAT must be {known} or None, got {self.format!r}')

    @property
    def is_stdin(self) -> bool:
        return self.path == '-'

    @property
    def display_name(self) -> str:
        return 'standard input' if self.is_stdin else self.path

    def __iter__(self) -> Iterator[str]:
        extension = os.path.splitext(self.path.lower().removesuffix('.gz'))[1]
        if (self.format or extension.removeprefix('.')) in TABLE_FORMATS:
            raise UserError(
                f'{self.display_name} is a table, which requires a template; set INPUTS as in finetuning, for example '
                "--gin.INPUTS='question: {question}', or pass --gin.INPUT_FORMAT=txt to read its lines"
            )
        is_jsonl = (self.format or _FORMAT_BY_EXTENSION.get(extension, TXT)) == JSONL
        try:
            with self._open_text() as file:
                for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_CHARACTERS + 1), ''), 1):
                    if len(line) > MAX_LINE_CHARACTERS:
                        raise UserError(
                            f'{self.display_name} line {number} must have at most {MAX_LINE_CHARACTERS:,} characters; '
                            'split it'
                        )
                    if not is_jsonl:
                        yield line.rstrip('\r\n')
                    elif line.strip():
                        yield self._read_json_field(line, number)
        except UserError:
            raise
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise UserError(
                f'{self.display_name} cannot be read as UTF-8 text ({root_cause_message(error)}); pass --input=FILE, '
                'or --input=- for a pipe'
            ) from error

    @contextlib.contextmanager
    def _open_text(self) -> Iterator[TextIO]:
        # Split lines only at \n, because a text may contain U+2028 or \r.
        if self.is_stdin:
            with open(sys.stdin.fileno(), encoding='utf-8-sig', newline='\n', closefd=False) as text:
                yield text
            return
        path = os.path.expanduser(self.path)
        with untrusted_files.open_file(path) as file:
            is_gzip = path.lower().endswith('.gz')
            with gzip.GzipFile(fileobj=file) if is_gzip else contextlib.nullcontext(file) as content:
                with io.TextIOWrapper(content, encoding='utf-8-sig', newline='\n') as text:  # type: ignore[type-var]
                    yield text

    def _read_json_field(self, line: str, number: int) -> str:
        try:
            row = untrusted_files.parse_json(line, odd_numbers=True)
        except untrusted_files.InvalidJsonError as error:
            raise UserError(
                f'{self.display_name} line {number}: {error}; set INPUT_FORMAT=txt to read plain text'
            ) from error
        text = row.get(self.field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            found = f'fields {to_one_line(", ".join(row)[:200])}' if isinstance(row, dict) else 'no JSON object'
            raise UserError(
                f'{self.display_name} line {number} must have a string in field {self.field!r}, got {found}; pass '
                '--field'
            )
        return text
