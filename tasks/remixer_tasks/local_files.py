"""Builds corpora from local text files, set up with gin macros or flags (FILES, VALIDATION_FILES, TEXT_FIELD, ...).

Reads documents from local or gs:// files in one of `FORMATS`, which may be gzipped.
Readers report unreadable and empty records to `BadRecords`, and raise UserError if a whole file is unusable.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import tf
from remixer_tasks.corpora.text_corpus import DocumentReader, ParsedCorpus
from remixer_tasks.files import cache, row_files, text_lines
from remixer_tasks.files.text_lines import BadRecords

FORMATS = ('txt', *row_files.FORMATS)
TXT_DOCUMENTS = ('passage', 'paragraph', 'line', 'file')
_EXTENSIONS = {'txt': 'txt', 'text': 'txt', 'md': 'txt', **row_files.EXTENSIONS}
# Minimum number of bytes per job, and approximate maximum number of jobs (the file of each job stays open).
JOB_BYTES, MAX_JOBS = 16 << 20, 64
# Minimum size of a passage in bytes (about 2,000 tokens), so that few training examples contain parts of two passages.
# A small corpus is split into about 100 shorter passages, so that some of them can be held out.
MIN_PASSAGE_BYTES, PASSAGES_PER_CORPUS = 8_000, 100
# Iterator over (number, text) pairs, where `number` is the 1-based line or row number.
Documents = Iterator[tuple[int, str]]
Files = str | Sequence[str]


def corpus(
    files: Files,
    validation_files: Files | None = None,
    format: str | None = None,
    field: str | int = 'text',
    txt_documents: str = 'paragraph',
    validation_fraction: ranges.OpenFraction = 0.01,
    strict: bool = False,
) -> ParsedCorpus:
    """Returns a corpus of text files, which are parsed at first use.

    Args:
        files: a path or glob, or a list of paths and globs, which may begin with `~` or gs://.
        validation_files: files with held-out documents; None holds out `validation_fraction` of all documents by hash.
        format: one of `FORMATS`; None detects the format from the file extension.
        field: JSON field or column name; for TSV and CSV without a header line, a 0-based column number.
        txt_documents: the part of a txt file that forms a document, one of `TXT_DOCUMENTS`. Blank lines delimit
            paragraphs, and a passage consists of adjacent paragraphs.
        strict: whether to raise UserError for a malformed or empty record instead of skipping and counting it.
    """
    layout = TextLayout(format, field, txt_documents)
    train = expand_paths(files, 'FILES')
    held_out = expand_held_out_paths(validation_files, train, 'FILES', 'VALIDATION_FILES')
    states = [[cache.read_file_state(path) for path in group] for group in (train, held_out)]
    passage = _choose_min_passage_bytes(states[0])
    limits = (text_lines.MAX_CHARACTERS, JOB_BYTES, MAX_JOBS, *([passage] if held_out else []))
    return ParsedCorpus(
        name=describe_files(train),
        identity=cache.hash_cache_key('local files 2', states, format, field, txt_documents, *limits),
        read=split_into_jobs(states[0], layout, passage),
        read_validation=split_into_jobs(states[1], layout, passage) if held_out else None,
        validation_fraction=validation_fraction,
        strict=strict,
    )


def describe_files(paths: Sequence[str]) -> str:
    """Returns a name for these files, to print in messages."""
    return paths[0] if len(paths) == 1 else f'{len(paths)} files ({paths[0]}, ...)'


def expand_held_out_paths(
    files: Files | None, train: Sequence[str], train_macro: str, macro: str, example: str = '*.txt'
) -> list[str]:
    """Expands held-out `files` to paths; returns [] for None. Raises UserError for a file that is also in `train`."""
    if files is None:
        return []
    held_out = expand_paths(files, macro, example)
    if shared := sorted({os.path.realpath(path) for path in train} & {os.path.realpath(path) for path in held_out}):
        raise UserError(f'{macro} and {train_macro} must not share files, got {shared[0]} in both; remove it from one')
    return held_out


def expand_paths(files: Files | None, macro: str, example: str = '*.txt') -> list[str]:
    """Expands paths and globs to sorted distinct paths. Error messages contain `macro` (the setting) and `example`."""
    patterns: Sequence[Any] = files if isinstance(files, list | tuple) else [files]
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UserError(
            f"{macro} must be a path or glob, or a list of them, got {files!r}; pass --gin.{macro}='~/data/{example}'"
        )
    return sorted({path for pattern in patterns for path in _match_files(pattern, macro, example)})


def _match_files(pattern: str, macro: str, example: str) -> list[str]:
    is_remote = '://' in pattern
    path = pattern if is_remote else os.path.abspath(os.path.expanduser(pattern))
    try:
        # The path of an existing file may contain glob characters.
        if glob.has_magic(path) and (is_remote or not os.path.exists(path)):
            matches = tf.io.gfile.glob(path) if is_remote else glob.glob(path, recursive=True)
        else:
            matches = [path] if tf.io.gfile.exists(path) else []
        files = [match for match in matches if not tf.io.gfile.isdir(match)]
    except tf.errors.OpError as error:
        raise UserError(
            f'{macro}: {pattern} cannot be read ({error.message.splitlines()[0]}); use local files'
        ) from error
    if not files and matches:
        raise UserError(
            f"{macro} must be files, got the folder {pattern}; use a glob such as '{pattern.rstrip('/')}/{example}'"
        )
    if not files:
        raise UserError(
            f'{macro} must be an existing path or match a file, got {pattern}; correct the path or the pattern'
        )
    return files


@dataclasses.dataclass(frozen=True)
class TextLayout:
    """Settings that determine how files are parsed into documents; see `corpus`."""

    format: str | None = None
    field: str | int = 'text'
    txt_documents: str = 'paragraph'

    def __post_init__(self):
        if self.txt_documents not in TXT_DOCUMENTS:
            raise UserError(f'TXT_DOCUMENTS must be one of {", ".join(TXT_DOCUMENTS)}, got {self.txt_documents!r}')

    def detect_format(self, path: str) -> str:
        """Returns the format of the file `path`. Raises UserError for an unknown format."""
        return row_files.choose_format(path, self.format, _EXTENSIONS, 'TEXT_FORMAT')


def _choose_min_passage_bytes(files: Sequence[cache.FileState]) -> int:
    """Returns the minimum size of a passage for these training files and for the held-out files."""
    # Gzipped files and files in buckets are assumed to be large.
    is_size_known = not any(file.path.lower().endswith('.gz') or '://' in file.path for file in files)
    total = sum(file.size for file in files)
    return min(MIN_PASSAGE_BYTES, total // PASSAGES_PER_CORPUS) if is_size_known else MIN_PASSAGE_BYTES


def split_into_jobs(files: Sequence[cache.FileState], layout: TextLayout, passage: int) -> list[DocumentReader]:
    """Returns picklable functions that together yield all documents of the files, in order.

    Each job reads one or more whole files, usually at least JOB_BYTES in total. There are at most about MAX_JOBS jobs.
    """
    total = sum(file.size for file in files)
    smallest = max(JOB_BYTES, total // MAX_JOBS)
    groups: list[list[cache.FileState]] = [[]]
    size = 0
    for file in files:
        if size + file.size // 2 >= smallest:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return [functools.partial(_read_files, group, layout, passage) for group in groups if group]


def _read_files(
    files: Sequence[cache.FileState], layout: TextLayout, passage: int, malformed: BadRecords
) -> Iterator[str]:
    """Yields the documents of the files. Raises UserError if a file has changed since its size was read."""
    for file in files:
        texts = read_documents(file.path, layout, malformed)
        is_passages = layout.txt_documents == 'passage' and layout.detect_format(file.path) == 'txt'
        yield from _join_paragraphs(texts, passage) if is_passages else texts
        if cache.read_file_state(file.path) != file:
            raise UserError(f'{file.path} changed while it was read; run the command again')


def _join_paragraphs(paragraphs: Iterable[str], min_bytes: int) -> Iterator[str]:
    """Joins adjacent paragraphs, separated by blank lines, into passages of at least `min_bytes`."""
    passage: list[str] = []
    size = 0
    for paragraph in paragraphs:
        passage.append(paragraph)
        size += len(paragraph.encode())
        if size >= min_bytes:
            yield '\n\n'.join(passage)
            passage, size = [], 0
    if passage:
        yield '\n\n'.join(passage)


def read_documents(path: str, layout: TextLayout, malformed: BadRecords) -> Iterator[str]:
    """Yields the non-empty documents of one file, in order. Raises UserError if the whole file is unusable."""
    read = _read_txt if layout.detect_format(path) == 'txt' else _read_rows
    for number, document in read(path, layout, malformed):
        if document.strip():
            yield document
        else:
            malformed.add_empty_record(path, number)


def _read_txt(path: str, layout: TextLayout, malformed: BadRecords) -> Documents:
    numbered = text_lines.read_valid_lines(path, malformed)
    if layout.txt_documents == 'line':
        yield from ((number, line) for number, line in numbered if line.strip())
        return
    document: list[str] = []
    start, size = 1, 0
    for number, line in itertools.chain(numbered, [(0, None)]):
        if line is not None and (layout.txt_documents == 'file' or line.strip()):
            start = start if size else number
            size += len(line) + 1
            # Does not store further lines of a document that is already too long.
            if size <= text_lines.MAX_CHARACTERS:
                document.append(line)
            else:
                document.clear()
        elif size:
            if size <= text_lines.MAX_CHARACTERS:
                yield start, '\n'.join(document)
            else:
                reason = f'the document that begins here has more than {text_lines.MAX_CHARACTERS:,} characters'
                malformed.add_malformed_record(path, start, reason)
            document, size = [], 0


def _read_rows(path: str, layout: TextLayout, malformed: BadRecords) -> Documents:
    field = str(layout.field)
    numbered = ranges.parse_whole_number(field) is not None
    row_layout = row_files.RowLayout(layout.detect_format(path), numbered=numbered)
    for number, row in row_files.read_rows_with_columns(path, row_layout, malformed, {'TEXT_FIELD': [field]}):
        text = row.get(field)
        if not isinstance(text, str):
            malformed.add_malformed_record(path, number, f"the field '{field}' is missing or not a string")
        elif len(text) > text_lines.MAX_CHARACTERS:
            reason = f'the text has more than {text_lines.MAX_CHARACTERS:,} characters'
            malformed.add_malformed_record(path, number, reason)
        else:
            yield number, text
