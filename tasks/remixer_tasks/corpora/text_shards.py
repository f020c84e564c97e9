"""Files of documents: TFRecords, in which one record is the UTF-8 bytes of one document."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from remixer_t5x import temporary, tf_data
from remixer_t5x.errors import UserError, reason
from remixer_t5x.lazy import tf
from remixer_tasks.files import cache

# Enough for the hosts of a large pod; a corpus with fewer documents gets fewer shards.
SHARDS = 64
# A document's UTF-8 bytes, and its share (see `share_of`).
Shared = tuple[bytes, float]
# Records that TensorFlow hands to Python at once. Handing over takes longer than reading a short document.
_TOGETHER = 64
# Around a record, a TFRecord has its length (8 bytes) and a checksum of the length before it, and a checksum after it.
_FRAME_BYTES = 16


class Shards:
    """Deals documents to the files of their split, in turn. counts: how many each split had before."""

    def __init__(self, folder: Path, counts: Mapping[str, int]):
        self.counts = dict(counts)
        self._folder = folder
        self._writers: dict[tuple[str, int], tf.io.TFRecordWriter] = {}

    def add(self, split: str, document: bytes) -> None:
        place = split, self.counts[split] % SHARDS
        writer = self._writers.get(place)
        if writer is None:
            writer = self._writers[place] = tf.io.TFRecordWriter(str(self._folder / name(*place)))
        writer.write(document)
        self.counts[split] += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for writer in self._writers.values():
            writer.close()


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Raises UserError where TensorFlow finds no space for a file."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise UserError(
            f'no space left in the cache {cache.root()}: free some, or set REMIXER_T5X_CACHE to a folder on another '
            'disk'
        ) from error


def name(split: str, index: int) -> str:
    """Of one file of a split."""
    return f'{split}-{index:05d}-of-{SHARDS:05d}'


def read(paths: str | Sequence[str]) -> Iterator[bytes]:
    """The records of files, one file after another. Raises tf.errors.OpError for a file that is damaged or gone."""
    for records in tf_data.arrays(tf.data.TFRecordDataset(paths).batch(_TOGETHER)):
        yield from records.tolist()


def texts(paths: Sequence[str], name: str, folder: Path) -> Iterator[str]:
    """The documents of files in a folder of the cache; `name` is what messages call the corpus.

    Raises UserError for a file that is damaged or gone.
    """
    try:
        yield from map(bytes.decode, read(paths))
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise UserError(f'{name} cannot be read from the cache ({reason(error)}); {cache.repair(folder)}') from error


def join(paths: Sequence[Path], joined: Path, shuffled: bool, durable: bool) -> None:
    """Makes one file of the records of several and removes those; only removes them if `joined` is there.

    Records are moved as they are, with their lengths and checksums: TensorFlow takes ten times as long.

    Args:
        paths: files that end with a whole record.
        joined: appears by one rename.
        shuffled: shuffles the records, always in the same way.
        durable: syncs `joined` to the disk before the others are removed.
    """
    if paths and not joined.exists():
        records = _records(b''.join(path.read_bytes() for path in paths))
        if shuffled:
            records = in_any_order(records)
        unfinished = joined.with_name(f'{joined.name}.tmp')
        with open(unfinished, 'wb') as file:
            file.writelines(records)
        (temporary.commit if durable else os.replace)(unfinished, joined)
    for path in paths:
        path.unlink()


def shuffle(path: Path) -> None:
    """Shuffles the records of a file, always in the same way. A process that is killed here leaves no whole file."""
    path.write_bytes(b''.join(in_any_order(_records(path.read_bytes()))))


def in_any_order(items: Sequence[Any]) -> list[Any]:
    """The same, shuffled, always in the same way."""
    shuffled = list(items)
    random.Random(0).shuffle(shuffled)
    return shuffled


def _records(content: bytes) -> list[memoryview]:
    """The records of files that follow each other, with their lengths and checksums."""
    records, at, view = [], 0, memoryview(content)
    while at < len(content):
        end = at + _FRAME_BYTES + int.from_bytes(content[at : at + 8], 'little')
        records.append(view[at:end])
        at = end
    return records


def share_of(document: bytes) -> float:
    """A number in [0, 1) that depends on the document's text alone, so that it keeps its split when others come."""
    return int.from_bytes(hashlib.sha256(document).digest()[:6], 'big') / 2**48


def check_fraction(fraction: float, documents: str = 'documents') -> None:
    """Raises UserError unless it can be the share of documents that is held out; `documents` is what it calls them."""
    if not 0.0 < fraction < 1.0:
        raise UserError(
            f'the held-out share is {fraction}, allowed is above 0 and below 1: 0.01 holds out 1 % of the {documents}'
        )
