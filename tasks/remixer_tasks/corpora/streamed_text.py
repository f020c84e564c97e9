"""A corpus that is read while a run trains, and never copied.

A *place* in it is a short JSON text: the epoch, how many shards of this epoch are finished, and the state of the shard
that is being read. `Reader.after` gives the document that follows a place, and the place after it. The pipeline carries
the place along as a tensor (see `text_source`), so that tf.data saves it together with the documents that are being
joined, corrupted and shuffled at that moment, and a restored pipeline continues with the next document.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio
from remixer_tasks.corpora.text_corpus import TRAIN, VALIDATION, check_fraction, share_of

START = b''


class Shards(Protocol):
    """The documents of a split in numbered shards."""

    @property
    def count(self) -> int:
        """How many shards there are."""

    @property
    def files(self) -> Sequence[str]:
        """Paths or addresses of what is read, so that a resumed run notices other data."""

    def read(self, shard: int, state: Any) -> Iterator[tuple[str, Any]]:
        """The documents of a shard after `state` (None: from its beginning), each with the state after it, which
        consists of JSON values. Raises UserError if the shard cannot be read."""


class StreamedCorpus:
    """Documents of `open_split(split)`, for tasks; see `text_corpus.Corpus`.

    validation_fraction: share of the training documents that is held out by the hash of their text, the same documents
    as `text_corpus.ParsedCorpus` holds out; None if 'validation' is a split of its own.

    What is held out is kept in memory as far as an evaluation has read it, because each evaluation reads it again, and
    finding it by hash takes reading all documents before it.
    """

    def __init__(
        self, name: str, identity: str, open_split: Callable[[str], Shards], validation_fraction: float | None
    ):
        if validation_fraction is not None:
            check_fraction(validation_fraction)
        self.name, self.identity = name, identity
        self._open_split, self._fraction = open_split, validation_fraction
        self._opened: dict[str, Shards] = {}
        self._held_out = _Remembered(self._find_held_out())

    def source(self, order: int = 0) -> seqio.DataSource:
        # Imported here, because the class derives from seqio's.
        from remixer_tasks.corpora.text_source import StreamedSource

        return StreamedSource(self, order)

    def training_documents(self) -> Iterator[str]:
        raise UserError(
            f'a vocabulary cannot be trained on {self.name}, which is not copied (HF_STREAMING=True): give one, as in '
            "--gin.VOCABULARY='@vocabularies.sentencepiece()' --gin.VOCABULARY_PATH=/path/to/spiece.model "
            "--gin.VOCAB_SIZE=32128, or bytes, --gin.VOCABULARY='@vocabularies.byte()' --gin.VOCAB_SIZE=384"
        )

    def shards(self, split: str) -> Shards:
        """The shards of 'train', or those in which the documents of 'validation' are. Raises UserError if they cannot
        be opened."""
        opened = TRAIN if self._fraction is not None else split
        if opened not in self._opened:
            self._opened[opened] = self._open_split(opened)
        return self._opened[opened]

    def is_held_out(self, document: bytes) -> bool:
        """Whether a document of the training shards is for validation."""
        return self._fraction is not None and share_of(document) < self._fraction

    def held_out(self) -> Iterator[bytes]:
        """The documents of 'validation', in the order of the shards. Raises UserError if there are none."""
        return iter(self._held_out)

    def _find_held_out(self) -> Iterator[bytes]:
        shards, found = self.shards(VALIDATION), False
        for shard in range(shards.count):
            for text, _ in shards.read(shard, None):
                document = text.encode()
                if self._fraction is None or self.is_held_out(document):
                    found = True
                    yield document
        if not found:
            raise UserError(
                f'{self.name} has no validation documents: give a larger VALIDATION_FRACTION, HF_VALIDATION_SPLIT, or '
                'EVAL_PERIOD = None'
            )


class Reader:
    """Documents of some shards from any place; several iterators may use it, from several threads.

    Args:
        corpus: whose training documents are read.
        shards: their numbers.
        seed: the shards of each epoch come in an order of its own, without end; None reads them once, as they are.
    """

    def __init__(self, corpus: StreamedCorpus, shards: Sequence[int], seed: str | None):
        self._corpus, self._shards, self._seed = corpus, shards, seed
        self._lock = threading.Lock()
        self._at: bytes | None = None
        self._following: Iterator[tuple[bytes, bytes]] = iter(())

    def after(self, place: bytes) -> tuple[bytes, bytes, bool]:
        """The place after the document that follows `place`, that document, and False; or True at the end.

        Raises UserError if a shard cannot be read, or if an epoch has no document.
        """
        with self._lock:
            if place != self._at:
                self._following = self._read(place)
            # Whatever raises an error below must be opened again.
            self._at = None
            after, document = next(self._following, (place, None))
            self._at = after
        return after, document or b'', document is None

    def _read(self, place: bytes) -> Iterator[tuple[bytes, bytes]]:
        epoch, finished, state = json.loads(place) if place != START else (0, 0, None)
        shards = self._corpus.shards(TRAIN)
        while True:
            is_whole, is_empty = not finished and state is None, True
            for turn, shard in list(enumerate(self._order(epoch)))[finished:]:
                for text, after in shards.read(shard, state):
                    document = text.encode()
                    if not self._corpus.is_held_out(document):
                        is_empty = False
                        yield json.dumps([epoch, turn, after]).encode(), document
                state = None
            if is_whole and is_empty:
                raise UserError(
                    f'{self._corpus.name} has no documents to train on in {len(self._shards)} of its {shards.count} '
                    'shards; give a data set with text, a smaller VALIDATION_FRACTION, or fewer STREAMS'
                )
            if self._seed is None:
                return
            epoch, finished = epoch + 1, 0

    def _order(self, epoch: int) -> Sequence[int]:
        if self._seed is None:
            return self._shards
        # Hashes, because NumPy's generators may give other numbers in another version.
        return sorted(self._shards, key=lambda shard: hashlib.sha256(f'{self._seed} {epoch} {shard}'.encode()).digest())


class _Remembered:
    """An iterable whose items are taken from `items` once, and as far as somebody has asked; for several threads."""

    def __init__(self, items: Iterator[bytes]):
        self._items, self._known = items, list[bytes]()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[bytes]:
        number = 0
        while True:
            with self._lock:
                if number == len(self._known):
                    item = next(self._items, None)
                    if item is None:
                        return
                    self._known.append(item)
            yield self._known[number]
            number += 1
