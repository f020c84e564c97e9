"""Reads the documents of a user's files in several processes, in the order of the files, and from any place on."""

from __future__ import annotations

import dataclasses
import functools
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks.corpora import documents, volumes
from remixer_tasks.corpora.text_shards import Shared, share_of
from remixer_tasks.files import parts, text_files, workers
from remixer_tasks.files.malformed import Malformed, Notes
from remixer_tasks.files.parts import Part

# Bytes of files from which on other processes help; they start in a tenth of a second.
_WORTH_IT = 8 << 20
# Bytes of documents in one message between processes.
_TOGETHER = 1 << 20
# Bytes of files in a volume, which two cores read in eight seconds.
VOLUME = 256 << 20
# Bytes of a passage: about 2,000 tokens, several times a row, so that few rows have the end of one text and the start
# of another. A small corpus has shorter passages, about a hundred of them, so that some can be held out.
PASSAGE, PASSAGES = 8_000, 100


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one process reads at a time.

    Attributes:
        path: the file.
        part: a part of the file; None is all of a file that cannot be cut.
        state: bytes of the file, and when it changed last; (0, 0) where that is not known.
    """

    path: str
    part: Part | None
    state: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.part.end - self.part.start if self.part else self.state[0]

    @property
    def is_last(self) -> bool:
        """Whether the file ends with it."""
        return self.part is None or self.part.is_last


@dataclasses.dataclass
class Place:
    """A place between two pieces. JSON values.

    Attributes:
        pieces: how many are before it.
        documents, lines: how many those have of the file that continues there.
        paragraphs: the first ones of a passage that continues there.
    """

    pieces: int = 0
    documents: int = 0
    lines: int = 0
    paragraphs: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """The documents of `paths`, one file after another."""

    paths: Sequence[str]
    layout: documents.Layout

    @functools.cached_property
    def pieces(self) -> Sequence[Piece]:
        return [Piece(path, part, _state(path)) for path in self.paths for part in _parts(path, self.layout)]

    @functools.cached_property
    def ends(self) -> Sequence[int]:
        """How many pieces are read at the end of each volume."""
        total = sum(piece.bytes for piece in self.pieces)
        count, read = max(total // VOLUME, 1), 0
        found: list[int] = []
        for number, piece in enumerate(self.pieces, 1):
            read += piece.bytes
            if read * count >= (len(found) + 1) * total and len(found) < count - 1:
                found.append(number)
        return [*found, len(self.pieces)]

    def source(self) -> volumes.Source:
        """The documents in volumes, see `ends`."""
        key = f'{VOLUME}-{parts.BYTES}'
        return volumes.Source(len(self.ends), key, lambda malformed, place: Reading(self, malformed, Place(**place)))

    @functools.cached_property
    def passage_bytes(self) -> int:
        """How many bytes a passage has at least."""
        # Files in buckets and zipped files count as large.
        known = not any(path.endswith('.gz') or '://' in path for path in self.paths)
        return min(PASSAGE, sum(_state(path)[0] for path in self.paths) // PASSAGES) if known else PASSAGE


class Reading:
    """Reads `files` from `place` on, volume by volume; `malformed` collects records that cannot be read.

    As many processes read as there are cores, where the files are large. `malformed` has what was noted up to `place`
    at the end of a volume.
    """

    def __init__(self, files: TextFiles, malformed: Malformed, place: Place):
        self._files, self._malformed, self._place = files, malformed, place
        jobs: list[workers.Job] = [
            (_parse, (piece.path, files.layout, piece.part)) for piece in files.pieces[place.pieces :]
        ]
        count = workers.cores()
        if count > 1 and sum(piece.bytes for piece in files.pieces if '://' not in piece.path) >= _WORTH_IT:
            self._results = workers.in_order(jobs, count)
        else:
            self._results = (result for function, given in jobs for result in function(*given))

    @property
    def place(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self._place)

    def volume(self) -> Iterator[Shared]:
        """The documents up to the next of the files' `ends`. Raises UserError if a file has changed meanwhile."""
        end = next(end for end in self._files.ends if end > self._place.pieces)
        pieces = self._files.pieces[self._place.pieces : end]
        for piece in pieces:
            if self._has_passages(piece.path):
                yield from self._passages(piece)
            else:
                yield from self._documents(piece)
            self._place.pieces += 1
        for path, state in {piece.path: piece.state for piece in pieces}.items():
            if _state(path) != state:
                raise UserError(f'{path} changed while it was read; type the command again, which reads it again')

    def _has_passages(self, path: str) -> bool:
        return self._files.layout.txt_documents == 'passage' and self._files.layout.format_of(path) == 'txt'

    def _passages(self, piece: Piece) -> Iterator[Shared]:
        """Paragraphs come from other processes and are joined here, so that passages do not depend on pieces."""
        together = [paragraph.encode() for paragraph in self._place.paragraphs]
        paragraphs = (paragraph for paragraph, _ in self._documents(piece))
        for text in _joined(paragraphs, self._files.passage_bytes, together):
            yield text, share_of(text)
        if together and piece.is_last:
            text = b'\n\n'.join(together)
            yield text, share_of(text)
            together = []
        self._place.paragraphs = [paragraph.decode() for paragraph in together]

    def _documents(self, piece: Piece) -> Iterator[Shared]:
        """The documents of a piece, or paragraphs of passages."""
        place = self._place
        for result in self._results:
            if isinstance(result, _End):
                self._malformed.add(piece.path, place.lines, result.notes)
                place.lines += result.lines
                break
            texts, shares = result
            place.documents += len(texts)
            yield from zip(texts, shares, strict=True)
        if piece.is_last:
            if piece.part and not place.documents and self._files.layout.format_of(piece.path) == 'txt':
                # No part knows that the others have no text either.
                self._malformed.empty(piece.path, 1)
            place.documents = place.lines = 0


def _joined(paragraphs: Iterable[bytes], least: int, together: list[bytes]) -> Iterator[bytes]:
    """Joins paragraphs that follow each other, with a blank line between them, until they have `least` bytes.

    `together` has the first paragraphs of the first passage, and at the end the paragraphs that are too few for one.
    """
    size = sum(map(len, together))
    for paragraph in paragraphs:
        together.append(paragraph)
        size += len(paragraph)
        if size >= least:
            yield b'\n\n'.join(together)
            together.clear()
            size = 0


@dataclasses.dataclass
class _End:
    """What is known of a part when it was read."""

    lines: int
    notes: Notes


def _parse(path: str, layout: documents.Layout, part: Part | None) -> Iterator[tuple[list[bytes], array[float]] | _End]:
    notes, texts, shares, size = Notes(), [], array('d'), 0
    for document in documents.read(path, layout, notes, part):
        data = document.encode()
        texts.append(data)
        shares.append(share_of(data))
        size += len(data)
        if size > _TOGETHER:
            yield texts, shares
            texts, shares, size = [], array('d'), 0
    yield texts, shares
    yield _End(_count_lines(path, part) if part else 0, notes)


def _count_lines(path: str, part: Part) -> int:
    with text_files.opened(path) as file:
        return parts.count_lines(file, part)


def _parts(path: str, layout: documents.Layout) -> Sequence[Part | None]:
    """What one process reads at a time of a file: the file, unless it can be cut."""
    form = layout.format_of(path)
    cuttable = form == 'jsonl' or (form == 'txt' and layout.txt_documents != 'file')
    if not cuttable or path.endswith('.gz') or '://' in path:
        return [None]
    return parts.cut(_state(path)[0], paragraphs=form == 'txt' and layout.txt_documents in documents.PARAGRAPHS)


def _state(path: str) -> tuple[int, int]:
    """Bytes of a file, and when it changed last; a file that is gone is for the reader."""
    try:
        if '://' in path:
            found = tf.io.gfile.stat(path)
            return found.length, found.mtime_nsec
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    except (OSError, tf.errors.OpError):
        return 0, 0
