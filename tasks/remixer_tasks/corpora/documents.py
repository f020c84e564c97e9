"""Reads documents out of text files: txt, JSON lines, TSV and Parquet, plain or gzipped, local or gs://.

Readers stream; they yield non-empty texts, hand unreadable and empty records to `Malformed`, and raise UserError for
what makes a whole file useless: missing, not gzip, without the field.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_tasks.files import bounded_lines, row_files
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.parts import Part
from remixer_tasks.files.text_files import lines

FORMATS = ('txt', 'jsonl', 'tsv', 'parquet')
# A passage is several paragraphs, which `parsing.TextFiles` joins; here they are read one by one.
TXT_DOCUMENTS = ('passage', 'paragraph', 'line', 'file')
PARAGRAPHS = ('passage', 'paragraph')
# Numbers of lines (or rows) from 1, and texts.
Documents = Iterator[tuple[int, str]]
_EXTENSIONS = {
    'txt': 'txt',
    'text': 'txt',
    'md': 'txt',
    **{extension: format for extension, format in row_files.EXTENSIONS.items() if format in FORMATS},
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of documents in files.

    format: one of FORMATS, or None to go by each file's extension.
    field: JSON field or column name; for TSV also a column number counted from 0, and then there is no header line.
    txt_documents: documents of a txt file are separated by blank lines ('paragraph'), are several of those joined
        ('passage'), are lines, or are files.
    longest: bytes of a line or document; a longer one is malformed, and never held in memory as a whole.
    """

    format: str | None = None
    field: str | int = 'text'
    txt_documents: str = 'paragraph'
    longest: int = bounded_lines.LONGEST

    def __post_init__(self):
        if self.format not in (None, *FORMATS):
            raise UserError(
                f"TEXT_FORMAT is '{self.format}', allowed are {', '.join(FORMATS)}: or None to go by the "
                'extension of each file'
            )
        if self.txt_documents not in TXT_DOCUMENTS:
            raise UserError(f"TXT_DOCUMENTS is '{self.txt_documents}', allowed are {', '.join(TXT_DOCUMENTS)}")
        if isinstance(self.longest, bool) or not isinstance(self.longest, int) or self.longest < 1:
            raise UserError(f'LONGEST_DOCUMENT is {self.longest!r}; it takes a number of bytes, as in 50_000_000')

    def format_of(self, path: str) -> str:
        """The format of this file. Raises UserError when neither setting nor extension says it."""
        return self.format or row_files.by_extension(path, _EXTENSIONS, 'TEXT_FORMAT')


def read(path: str, layout: Layout, malformed: Malformed, part: Part | None = None) -> Iterator[str]:
    """Yields the non-empty documents of one file, in order. Raises UserError, see the module.

    part: read this part alone, of a txt file or JSON lines; that a whole txt file has no text is not noted then.
    """
    if part is not None:
        numbered = (_read_txt if layout.format_of(path) == 'txt' else _read_jsonl)(path, layout, malformed, part)
    else:
        readers = {'txt': _read_txt, 'jsonl': _read_jsonl, 'tsv': _read_tsv, 'parquet': _read_parquet}
        numbered = readers[layout.format_of(path)](path, layout, malformed)
    for number, document in numbered:
        if document.strip():
            yield document
        else:
            malformed.empty(path, number)


def _read_txt(path: str, layout: Layout, malformed: Malformed, part: Part | None = None) -> Documents:
    found = part is not None
    for number, document in _txt_documents(path, layout, malformed, part):
        if document.strip():
            found = True
            yield number, document
    if not found:
        # Blank lines only separate, so nothing less than a whole file is empty.
        yield 1, ''


def _txt_documents(path: str, layout: Layout, malformed: Malformed, part: Part | None) -> Documents:
    numbered = lines(path, layout.longest, malformed, part=part)
    if layout.txt_documents == 'line':
        yield from numbered
        return
    document: list[str] = []
    start, size, is_paragraph = 1, 0, layout.txt_documents in PARAGRAPHS
    for number, line in numbered:
        if is_paragraph and (not line or line.isspace()):
            if size:
                yield from _joined(path, layout, malformed, start, size, document)
                document, size = [], 0
            continue
        start = start if size else number
        # What is too long already is not kept.
        size += (len(line) if line.isascii() else len(line.encode())) + 1
        if size <= layout.longest:
            document.append(line)
        else:
            document.clear()
    yield from _joined(path, layout, malformed, start, size, document)


def _joined(path: str, layout: Layout, malformed: Malformed, start: int, size: int, document: list[str]) -> Documents:
    if size > layout.longest:
        malformed.record(path, start, f'the document that begins here has more than {layout.longest:,} bytes')
    else:
        yield start, '\n'.join(document)


def _read_jsonl(path: str, layout: Layout, malformed: Malformed, part: Part | None = None) -> Documents:
    is_first = part is None or part.start == 0
    for number, record in row_files.json_rows(path, layout.longest, malformed, part=part):
        if is_first and layout.field not in record:
            raise _no_field(path, layout.field, 'field', list(record))
        is_first = False
        text = record.get(layout.field)  # type: ignore[arg-type]
        if isinstance(text, str):
            # A lone surrogate (half of an escaped pair) is a Python string but no text.
            yield number, text.encode('utf-8', 'replace').decode()
        else:
            malformed.record(path, number, f"the field '{layout.field}' is missing or not a text")


def _read_tsv(path: str, layout: Layout, malformed: Malformed) -> Documents:
    field: Any = layout.field
    column = ranges.whole_number(field)
    for number, line in lines(path, layout.longest, malformed):
        cells = line.split('\t')
        if column is None:
            if field not in cells:
                raise _no_field(path, field, 'column', cells)
            column = cells.index(field)
        elif column < len(cells) and line:
            yield number, cells[column]
        elif line.strip():
            malformed.record(path, number, f'{len(cells)} columns, the text should be in column {column} (from 0)')


def _read_parquet(path: str, layout: Layout, malformed: Malformed) -> Documents:
    def only_field(names: list[str]) -> list[str]:
        if layout.field not in names:
            raise _no_field(path, layout.field, 'column', names)
        return [str(layout.field)]

    for number, row in row_files.parquet_rows(path, 'TEXT_FORMAT', only_field):
        text = row[str(layout.field)]
        if not isinstance(text, str):
            malformed.record(path, number, f"the column '{layout.field}' is empty or not a text")
        elif len(text) > layout.longest:
            malformed.record(path, number, f'the text has more than {layout.longest:,} characters')
        else:
            yield number, text


def _no_field(path: str, field: str | int, kind: str, names: list[str]) -> UserError:
    found = ', '.join(ascii(name)[:60] if len(name) > 60 else repr(name) for name in names[:10]) + (
        ', ...' if len(names) > 10 else ''
    )
    return UserError(f"{path} has no {kind} '{field}', it has {found}: set TEXT_FIELD to one of them")
