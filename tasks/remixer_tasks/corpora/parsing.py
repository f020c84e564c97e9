"""Reads the documents of a user's files in several processes, in the order of the files."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence

from remixer_tasks.corpora import documents
from remixer_tasks.corpora.text_shards import share_of
from remixer_tasks.files import parts, text_files, workers
from remixer_tasks.files.malformed import Malformed, Notes
from remixer_tasks.files.parts import Part

# Bytes of files from which on other processes help; they start in a tenth of a second.
_WORTH_IT = 8 << 20
# Bytes of documents in one message between processes.
_TOGETHER = 1 << 20
# Bytes of a passage: about 2,000 tokens, several times a row, so that few rows have the end of one text and the start
# of another. A small corpus has shorter passages, about a hundred of them, so that some can be held out.
PASSAGE, PASSAGES = 8_000, 100
# A document's UTF-8 bytes, and its share (see `share_of`).
Shared = tuple[bytes, float]


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """The documents of `paths`, one file after another. Called with `malformed`, it reads them in this process."""

    paths: Sequence[str]
    layout: documents.Layout

    def __call__(self, malformed: Malformed) -> Iterator[str]:
        for path in self.paths:
            read = documents.read(path, self.layout, malformed)
            if self._has_passages(path):
                yield from (text.decode() for text in _passages(map(str.encode, read), self._passage_bytes))
            else:
                yield from read

    def _has_passages(self, path: str) -> bool:
        return self.layout.txt_documents == 'passage' and self.layout.format_of(path) == 'txt'

    @functools.cached_property
    def _passage_bytes(self) -> int:
        # Files in buckets and zipped files count as large.
        known = not any(path.endswith('.gz') or '://' in path for path in self.paths)
        return min(PASSAGE, sum(map(_size, self.paths)) // PASSAGES) if known else PASSAGE

    def shared(self, malformed: Malformed) -> Iterator[Shared]:
        """The same, read by as many processes as there are cores where the files are large."""
        count = workers.cores()
        if count < 2 or sum(map(_size, self.paths)) < _WORTH_IT:
            return ((document, share_of(document)) for document in map(str.encode, self(malformed)))
        return self._in_processes(malformed, count)

    def _in_processes(self, malformed: Malformed, count: int) -> Iterator[Shared]:
        """Paragraphs come from other processes and are joined here, so that passages do not depend on parts."""
        results = self._parsed(malformed, count)
        for path, found in itertools.groupby(results, key=lambda one: one[0]):
            shared = (one for _, one in found)
            if self._has_passages(path):
                texts = _passages((text for text, _ in shared), self._passage_bytes)
                shared = ((text, share_of(text)) for text in texts)
            yield from shared

    def _parsed(self, malformed: Malformed, count: int) -> Iterator[tuple[str, Shared]]:
        """(path, what it has) for all documents, or paragraphs of passages, in order."""
        cut = [(path, part) for path in self.paths for part in _parts(path, self.layout)]
        jobs: list[workers.Job] = [(_parse, (path, self.layout, part)) for path, part in cut]
        ends = iter(cut)
        path, part = next(ends)
        found, before = 0, 0
        for result in workers.in_order(jobs, count):
            if not isinstance(result, _End):
                texts, shares = result
                found += len(texts)
                yield from ((path, shared) for shared in zip(texts, shares, strict=True))
                continue
            malformed.add(path, before, result.notes)
            before += result.lines
            if part is None or part.is_last:
                if part is not None and not found and self.layout.format_of(path) == 'txt':
                    malformed.empty(path, 1)
                found, before = 0, 0
            path, part = next(ends, (path, part))


def _passages(paragraphs: Iterable[bytes], least: int) -> Iterator[bytes]:
    """Joins paragraphs that follow each other, with a blank line between them, until they have `least` bytes."""
    together: list[bytes] = []
    size = 0
    for paragraph in paragraphs:
        together.append(paragraph)
        size += len(paragraph)
        if size >= least:
            yield b'\n\n'.join(together)
            together, size = [], 0
    if together:
        yield b'\n\n'.join(together)


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
    return parts.cut(_size(path), paragraphs=form == 'txt' and layout.txt_documents in documents.PARAGRAPHS)


def _size(path: str) -> int:
    """Bytes of a local file; the others, and those that are gone, are for the reader."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
