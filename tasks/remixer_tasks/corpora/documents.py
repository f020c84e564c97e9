"""Documents of text files: txt, JSON lines, TSV and Parquet, plain or gzipped, local or gs://.

Readers stream; they yield non-empty texts, pass unreadable and empty records to `Malformed`, and raise UserError for
what makes a whole file useless: missing, not gzip, without the field. `jobs` divides the files among processes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks.files import row_files
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.text_files import LONGEST, Part, lines

FORMATS = ('txt', 'jsonl', 'tsv', 'parquet')
TXT_DOCUMENTS = ('passage', 'paragraph', 'line', 'file')
_PARAGRAPHS = ('passage', 'paragraph')
_EXTENSIONS = {'txt': 'txt', 'text': 'txt', 'md': 'txt', 'json': 'jsonl', 'ndjson': 'jsonl'}
_EXTENSIONS |= {format: format for format in FORMATS}
# Fewest bytes of a job, and most jobs for one text. A killed command repeats the jobs that were running; each job
# writes a file that stays open.
JOB_BYTES, MAX_JOBS = 16 << 20, 64
# Bytes of a passage: about 2,000 tokens, several times a row, so that few rows contain the end of one text and the
# start of another. A small corpus has shorter passages, about a hundred of them, so that some can be held out.
PASSAGE, PASSAGES = 8_000, 100
# Numbers of lines (or rows) from 1, and texts.
Documents = Iterator[tuple[int, str]]
Read = Callable[[Malformed], Iterator[str]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of documents in files.

    Attributes:
        format: one of FORMATS, or None to use each file's extension.
        field: JSON field or column name; for TSV also a column number from 0, and then there is no header line.
        txt_documents: documents of a txt file are paragraphs separated by blank lines ('paragraph'), several of those
            joined ('passage'), lines, or whole files.
        longest: bytes of a line or document; a longer one is malformed, and never held in memory as a whole.
    """

    format: str | None = None
    field: str | int = 'text'
    txt_documents: str = 'paragraph'
    longest: int = LONGEST

    def __post_init__(self):
        if self.format not in (None, *FORMATS):
            raise UserError(
                f'TEXT_FORMAT must be {", ".join(FORMATS)} or None, got {self.format!r}; None uses the extensions'
            )
        if self.txt_documents not in TXT_DOCUMENTS:
            raise UserError(f'TXT_DOCUMENTS must be one of {", ".join(TXT_DOCUMENTS)}, got {self.txt_documents!r}')
        if isinstance(self.longest, bool) or not isinstance(self.longest, int) or self.longest < 1:
            raise UserError(f'LONGEST_DOCUMENT must be a number of bytes, got {self.longest!r}; type 50_000_000')

    def format_of(self, path: str) -> str:
        """The format of this file. Raises UserError if neither setting nor extension names it."""
        return self.format or row_files.by_extension(path, _EXTENSIONS, 'TEXT_FORMAT')


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a job reads of a file.

    Attributes:
        part: a range of bytes; None is the whole file.
        state: bytes of the file and time of its last change.
    """

    path: str
    part: Part | None
    state: tuple[int, int]


def jobs(paths: Sequence[str], layout: Layout) -> Sequence[Read]:
    """Functions that together read the documents of the files in order. They can be pickled.

    Groups files and parts of large files into jobs of at least JOB_BYTES, at most about MAX_JOBS of them.
    """
    states = {path: _state(path) for path in paths}
    total = sum(size for size, _ in states.values())
    most = max(JOB_BYTES, total // MAX_JOBS)
    # The texts of gzipped files and of files in buckets are taken to be long.
    is_size_known = not any(path.endswith('.gz') or '://' in path for path in paths)
    passage = min(PASSAGE, total // PASSAGES) if is_size_known else PASSAGE
    groups: list[list[Piece]] = [[]]
    group_bytes = 0
    for piece in (piece for path in paths for piece in divide(path, layout, states[path], most)):
        size = piece.part.end - piece.part.start if piece.part else piece.state[0]
        if group_bytes + size // 2 >= most:
            groups.append([])
            group_bytes = 0
        groups[-1].append(piece)
        group_bytes += size
    return [functools.partial(_read_pieces, tuple(group), layout, passage) for group in groups if group]


def divide(path: str, layout: Layout, state: tuple[int, int], most: int) -> Iterable[Piece]:
    """Equal parts of at most `most` bytes; the whole file if its format cannot be divided."""
    format, size = layout.format_of(path), state[0]
    is_divisible = format == 'jsonl' or (format == 'txt' and layout.txt_documents != 'file')
    if not is_divisible or path.endswith('.gz') or '://' in path or size <= most:
        return [Piece(path, None, state)]
    by_paragraph = format == 'txt' and layout.txt_documents in _PARAGRAPHS
    count = -(-size // most)
    bounds = [size * number // count for number in range(count + 1)]
    return [Piece(path, Part(start, end, by_paragraph), state) for start, end in itertools.pairwise(bounds)]


def _read_pieces(pieces: Sequence[Piece], layout: Layout, passage: int, malformed: Malformed) -> Iterator[str]:
    """The documents of the pieces. Raises UserError if a file has changed since the jobs were made."""
    for piece in pieces:
        texts = read(piece.path, layout, malformed, piece.part)
        if layout.txt_documents == 'passage' and layout.format_of(piece.path) == 'txt':
            texts = _passages(texts, passage)
        yield from texts
        if _state(piece.path) != piece.state:
            raise UserError(f'{piece.path} changed while it was read; type the command again, which reads it again')


def _passages(paragraphs: Iterable[str], min_bytes: int) -> Iterator[str]:
    """Joins adjacent paragraphs, with a blank line between them, until they have `min_bytes`."""
    passage: list[str] = []
    size = 0
    for paragraph in paragraphs:
        passage.append(paragraph)
        size += _utf8_length(paragraph)
        if size >= min_bytes:
            yield '\n\n'.join(passage)
            passage, size = [], 0
    if passage:
        yield '\n\n'.join(passage)


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _state(path: str) -> tuple[int, int]:
    """Bytes of a file and time of its last change; zeros for a missing file, which the reader reports."""
    try:
        if '://' in path:
            remote = tf.io.gfile.stat(path)
            return remote.length, remote.mtime_nsec
        local = os.stat(path)
        return local.st_size, local.st_mtime_ns
    except (OSError, tf.errors.OpError):
        return 0, 0


def read(path: str, layout: Layout, malformed: Malformed, part: Part | None = None) -> Iterator[str]:
    """Yields the non-empty documents of one file, in order. Raises UserError, see the module.

    part: reads only this part of a txt file or JSON lines, and does not report an empty txt file.
    """
    readers = {'txt': _read_txt, 'jsonl': _read_jsonl, 'tsv': _read_tsv, 'parquet': _read_parquet}
    for number, document in readers[layout.format_of(path)](path, layout, malformed, part):
        if document.strip():
            yield document
        else:
            malformed.empty(path, number)


def _read_txt(path: str, layout: Layout, malformed: Malformed, part: Part | None) -> Documents:
    is_empty = part is None
    for number, document in _txt_documents(path, layout, malformed, part):
        if document.strip():
            is_empty = False
            yield number, document
    if is_empty:
        # Blank lines are separators, so only a whole file can be empty.
        yield 1, ''


def _txt_documents(path: str, layout: Layout, malformed: Malformed, part: Part | None) -> Documents:
    numbered = lines(path, layout.longest, malformed, part=part)
    if layout.txt_documents == 'line':
        yield from numbered
        return
    by_paragraph = layout.txt_documents in _PARAGRAPHS
    document: list[str] = []
    start, size = 1, 0
    for number, line in itertools.chain(numbered, [(0, None)]):
        if line is not None and not (by_paragraph and (not line or line.isspace())):
            start = start if size else number
            size += _utf8_length(line) + 1
            # A document that is too long already is not held in memory.
            if size <= layout.longest:
                document.append(line)
            else:
                document.clear()
        elif size > layout.longest:
            malformed.record(path, start, f'the document that begins here has more than {layout.longest:,} bytes')
            document, size = [], 0
        elif size:
            yield start, '\n'.join(document)
            document, size = [], 0


def _read_jsonl(path: str, layout: Layout, malformed: Malformed, part: Part | None) -> Documents:
    is_first = part is None or part.start == 0
    for number, record in row_files.json_rows(path, layout.longest, malformed, part=part):
        if is_first and layout.field not in record:
            raise _no_field(path, layout.field, 'field', list(record))
        is_first = False
        text = record.get(layout.field)  # type: ignore[arg-type]
        if isinstance(text, str):
            # A lone surrogate (half of an escaped pair) cannot be encoded.
            yield number, text.encode('utf-8', 'replace').decode()
        else:
            malformed.record(path, number, f"the field '{layout.field}' is missing or not a text")


def _read_tsv(path: str, layout: Layout, malformed: Malformed, part: Part | None) -> Documents:
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


def _read_parquet(path: str, layout: Layout, malformed: Malformed, part: Part | None) -> Documents:
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
    shown = ', '.join(ascii(name)[:60] for name in names[:10]) + (', ...' if len(names) > 10 else '')
    return UserError(f"{path} has no {kind} '{field}', it has {shown}; set TEXT_FIELD to one of them")
