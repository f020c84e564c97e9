"""Divides a user's text files among processes, and joins paragraphs to passages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks.corpora import documents
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.text_files import Part

# Fewest bytes of a job, and most jobs for one text. A killed process loses the jobs that were running; each job makes a
# file that stays open.
JOB_BYTES, MOST_JOBS = 16 << 20, 64
# Bytes of a passage: about 2,000 tokens, several times a row, so that few rows have the end of one text and the start
# of another. A small corpus has shorter passages, about a hundred of them, so that some can be held out.
PASSAGE, PASSAGES = 8_000, 100

State = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a job reads of a file: a part (None is all of it). state: bytes of the file, and when it changed last."""

    path: str
    part: Part | None
    state: State

    @property
    def bytes(self) -> int:
        return self.part.end - self.part.start if self.part else self.state[0]


def jobs(paths: Sequence[str], layout: documents.Layout) -> Sequence[Callable[[Malformed], Iterator[str]]]:
    """Functions that together read the documents of the files, one file after another; they depend on nothing else."""
    states = {path: _state(path) for path in paths}
    total = sum(size for size, _ in states.values())
    most = max(JOB_BYTES, total // MOST_JOBS)
    # Files in buckets and zipped files count as large.
    known = not any(path.endswith('.gz') or '://' in path for path in paths)
    read = functools.partial(_read, layout=layout, passage=min(PASSAGE, total // PASSAGES) if known else PASSAGE)
    groups: list[list[Piece]] = [[]]
    size = 0
    for piece in (piece for path in paths for piece in _cut(path, layout, states[path], most)):
        if size + piece.bytes // 2 >= most:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.bytes
    return [functools.partial(read, tuple(group)) for group in groups if group]


def _cut(path: str, layout: documents.Layout, state: State, most: int) -> Iterable[Piece]:
    form, size = layout.format_of(path), state[0]
    cuttable = form == 'jsonl' or (form == 'txt' and layout.txt_documents != 'file')
    if not cuttable or path.endswith('.gz') or '://' in path or size <= most:
        return [Piece(path, None, state)]
    paragraphs = form == 'txt' and layout.txt_documents in documents.PARAGRAPHS
    count = -(-size // most)
    bounds = [size * number // count for number in range(count + 1)]
    return [Piece(path, Part(start, end, paragraphs), state) for start, end in itertools.pairwise(bounds)]


def _read(pieces: Sequence[Piece], malformed: Malformed, layout: documents.Layout, passage: int) -> Iterator[str]:
    """The documents of the pieces. Raises UserError if a file has changed since the jobs were made."""
    for piece in pieces:
        texts = documents.read(piece.path, layout, malformed, piece.part)
        if layout.txt_documents == 'passage' and layout.format_of(piece.path) == 'txt':
            texts = _passages(texts, passage)
        yield from texts
        if _state(piece.path) != piece.state:
            raise UserError(f'{piece.path} changed while it was read; type the command again, which reads it again')


def _passages(paragraphs: Iterable[str], least: int) -> Iterator[str]:
    """Joins paragraphs that follow each other, with a blank line between them, until they have `least` bytes."""
    together: list[str] = []
    size = 0
    for paragraph in paragraphs:
        together.append(paragraph)
        size += len(paragraph) if paragraph.isascii() else len(paragraph.encode())
        if size >= least:
            yield '\n\n'.join(together)
            together, size = [], 0
    if together:
        yield '\n\n'.join(together)


def _state(path: str) -> State:
    """Bytes of a file, and when it changed last; a file that is gone is for the reader."""
    try:
        if '://' in path:
            found = tf.io.gfile.stat(path)
            return found.length, found.mtime_nsec
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    except (OSError, tf.errors.OpError):
        return 0, 0
