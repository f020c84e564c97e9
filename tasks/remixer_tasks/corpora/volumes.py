"""Documents on their way to a corpus's files, in volumes, so that a killed process continues with the next volume.

A volume is a folder with the next records of each file, and `volume.json`, which says how far reading has come. Volumes
follow each other in the order of the documents, and the files that are joined from them have the same bytes wherever
one volume ends and the next begins. A folder gets the name of a volume by one rename, when all is in it. Where a run
reads the first volumes while later ones are written (`growing_text`), the volumes stay as they are.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from remixer_t5x import temporary, untrusted_files
from remixer_tasks.corpora import text_shards
from remixer_tasks.corpora.text_shards import Shards, Shared
from remixer_tasks.files import cache
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.files.notice import Notice

TRAIN, VALIDATION = 'train', 'validation'
_DONE = 'volume.json'


class Reading(Protocol):
    """Documents that are read volume by volume."""

    @property
    def place(self) -> Mapping[str, Any]:
        """JSON values that say how far it has come; changes at the end of a volume."""

    def volume(self) -> Iterator[Shared]:
        """The documents of the next volume."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where documents come from.

    Attributes:
        count: of volumes.
        key: differs where other documents are in a volume.
        begin: reads on from the `place` of an earlier reading, {} at the start; the other argument collects records
            that cannot be read.
    """

    count: int
    key: str
    begin: Callable[[Malformed, Mapping[str, Any]], Reading]


@dataclasses.dataclass(frozen=True)
class Progress:
    """What is known after a volume.

    Attributes:
        counts: how many documents each split has.
        smallest: share of a document (see `text_shards.share_of`).
        place: see `Reading`; empty at the start.
        skipped: the `record_of_skipped` of `Malformed`.
    """

    counts: Mapping[str, int]
    smallest: float = 1.0
    place: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    skipped: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Volumes:
    """The volumes of one reading.

    Attributes:
        folder: for the volumes.
        joined: for the files that are joined from them; None where the volumes stay. Each then has every file of both
            splits, the training documents shuffled.
        durable: what is finished also survives that the machine stops.
        notice: shows how far it is.
        parts: what it calls documents.
    """

    folder: Path
    joined: Path | None
    durable: bool
    notice: Notice
    parts: str

    def read(self, source: Source, split: Callable[[float], str], start: Progress, strict: bool) -> Progress:
        """Reads the volumes that are not there yet; the progress after the last. See `each`."""
        *_, (_, last) = self.each(source, split, start, strict)
        return last

    def each(
        self, source: Source, split: Callable[[float], str], start: Progress, strict: bool
    ) -> Iterator[tuple[int, Progress]]:
        """Reads the volumes that are not there yet. Gives how many are there and the progress after them, at first and
        after each that it reads.

        Args:
            source: where the documents come from.
            split: says where a document goes, by its share.
            start: the progress before the first volume.
            strict: a malformed record is refused.

        Raises:
            UserError: something is wrong with the text.
        """
        self.folder.mkdir(exist_ok=True)
        number, progress = self._finished(start)
        yield number, progress
        if number == source.count:
            return
        malformed = Malformed(strict, progress.skipped)
        reading = source.begin(malformed, progress.place)
        for volume in range(number, source.count):
            self.notice.step(volume, source.count, 'volumes')
            unfinished = self.folder / 'unfinished'
            unfinished.mkdir()
            counts, smallest = self._write(unfinished, reading, split, progress)
            progress = Progress(counts, smallest, reading.place, malformed.record_of_skipped())
            self._finish(unfinished, volume, progress)
            yield volume + 1, progress
        self.notice.step(source.count, source.count, 'volumes')

    def join(self, split: str, shuffled: bool) -> None:
        """Makes the files of a split, each from its parts in the volumes, which it removes."""
        assert self.joined is not None
        folders = sorted(path for path in self.folder.iterdir() if path.is_dir())
        for index in range(text_shards.SHARDS):
            self.notice.update(lambda: f'joining file {index + 1} of {text_shards.SHARDS}')  # noqa: B023 (called at once)
            name = text_shards.name(split, index)
            parts = [folder / name for folder in folders if (folder / name).exists()]
            text_shards.join(parts, self.joined / name, shuffled, self.durable)

    def _write(
        self, folder: Path, reading: Reading, split: Callable[[float], str], before: Progress
    ) -> tuple[Mapping[str, int], float]:
        smallest = before.smallest
        with Shards(folder, before.counts) as shards:
            for document, share in reading.volume():
                smallest = min(smallest, share)
                shards.add(split(share), document)
                self.notice.update(lambda: f'{sum(shards.counts.values()):,} {self.parts}')
        return shards.counts, smallest

    def _finish(self, folder: Path, number: int, progress: Progress) -> None:
        if self.joined is None:
            _complete(folder)
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        reached = dataclasses.asdict(progress)
        (folder / _DONE).write_text(json.dumps([cache.key(sizes, reached), sizes, reached]))
        (temporary.commit if self.durable else os.replace)(folder, self.volume(number))

    def volume(self, number: int) -> Path:
        """The folder of a volume, from 0."""
        return self.folder / f'{number:06d}'

    def is_whole(self, number: int) -> bool:
        """Whether a volume is there as it was written."""
        return self._progress(self.volume(number)) is not None

    def finished(self) -> int:
        """How many volumes are there, without a gap."""
        return self._count(Progress({}))[0]

    def _finished(self, start: Progress) -> tuple[int, Progress]:
        """`_count`. Removes everything else."""
        number, progress = self._count(start)
        finished = {self.volume(index) for index in range(number)}
        for path in self.folder.iterdir():
            if path not in finished:
                temporary.remove(path)
        return number, progress

    def _count(self, start: Progress) -> tuple[int, Progress]:
        """How many volumes are there, without a gap, and the progress after them."""
        number, progress = 0, start
        while (found := self._progress(self.volume(number))) is not None:
            number, progress = number + 1, found
        return number, progress

    def _progress(self, folder: Path) -> Progress | None:
        """The progress after a volume; None if it is not there as it was written."""
        try:
            key, sizes, progress = untrusted_files.parse(untrusted_files.read_bytes(folder / _DONE))
            if key != cache.key(sizes, progress):
                return None
            is_whole = all(self._has(folder, name, size) for name, size in sizes.items())
        except (OSError, ValueError, TypeError):
            return None
        return Progress(**progress) if is_whole else None

    def _has(self, folder: Path, name: str, size: int) -> bool:
        """Whether a file of a volume is there, or what was joined from it."""
        is_joined = self.joined is not None and (self.joined / name).exists()
        return is_joined or (folder / name).stat().st_size == size


def _complete(folder: Path) -> None:
    """Makes every file of a volume that stays, because its readers know no other volume."""
    for index in range(text_shards.SHARDS):
        for split in (TRAIN, VALIDATION):
            (folder / text_shards.name(split, index)).touch()
        text_shards.shuffle(folder / text_shards.name(TRAIN, index))


def read_at_once(read: Callable[[Malformed], Iterator[str]]) -> Source:
    """All that a function gives, as one volume."""
    return Source(1, '', lambda malformed, place: _AtOnce(read, malformed))


@dataclasses.dataclass(frozen=True)
class _AtOnce:
    read: Callable[[Malformed], Iterator[str]]
    malformed: Malformed
    place: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def volume(self) -> Iterator[Shared]:
        return ((text, text_shards.share_of(text)) for text in map(str.encode, self.read(self.malformed)))
