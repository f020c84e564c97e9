"""Defines corpora that are read during training, without a local copy.

The *position* of a reader is a JSON list: the epoch, the number of shards finished in this epoch, and the state of the
current shard. The position is a tensor in the tf.data pipeline (see `sources.StreamedSource`), so tf.data saves it
together with the buffered documents, and a restored pipeline continues with the next document.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio
from remixer_tasks.corpora.text_corpus import TRAIN, VALIDATION, hash_to_fraction

START_POSITION = b''


class StreamedCorpus:
    """A corpus that streams the documents of `open_split(split)`, such as a `huggingface_datasets.DatasetShards`.

    The result of `open_split` has numbered shards. Its `files` are paths or URLs of the data, by which a resumed run
    detects that the data has changed. Its `read_documents(shard, state)` yields (document, JSON state) pairs of a
    shard, after `state`, or from the start if `state` is None.

    A fraction `validation_fraction` of the training documents is held out, selected by the hash of their text. If the
    fraction is None, the split 'validation' is held out instead. Held-out documents stay in memory after they are first
    read, because every evaluation needs them and searching the training shards again would be slow.
    """

    def __init__(self, name: str, identity: str, open_split: Callable[[str], Any], validation_fraction: float | None):
        self.name, self.training_data_key = name, identity
        self._open_split, self._fraction = open_split, validation_fraction
        self._opened: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._held_out: list[bytes] = []
        self._more_held_out: Iterator[bytes] = self._read_held_out_documents()

    def create_source(self, order: int = 0) -> seqio.DataSource:
        # Imported lazily, because `sources` imports seqio.
        from remixer_tasks.corpora.sources import StreamedSource

        return StreamedSource(self, order)

    def read_training_documents(self) -> Iterator[str]:
        raise UserError(
            f'a vocabulary cannot be trained on {self.name}, which is streamed (HF_STREAMING=True); pass '
            "--gin.VOCABULARY='@vocabularies.sentencepiece()' --gin.VOCABULARY_PATH=/path/to/spiece.model "
            "--gin.VOCAB_SIZE=32128, or --gin.VOCABULARY='@vocabularies.byte()' --gin.VOCAB_SIZE=384"
        )

    def open_shards(self, split: str) -> Any:
        """Returns the shards of a split, or those of 'train' if validation documents are held out from 'train'."""
        opened = TRAIN if self._fraction is not None else split
        if opened not in self._opened:
            self._opened[opened] = self._open_split(opened)
        return self._opened[opened]

    def is_held_out(self, document: bytes) -> bool:
        """Returns whether a document in the training shards is held out."""
        return self._fraction is not None and hash_to_fraction(document) < self._fraction

    def get_held_out_documents(self) -> Iterator[bytes]:
        """Yields the documents of 'validation', in the order of the shards. Raises UserError if there are none."""
        for number in itertools.count():
            with self._lock:
                if number == len(self._held_out):
                    try:
                        document = next(self._more_held_out, None)
                    except BaseException:
                        # A generator cannot continue after an error, so the next call reads the shards again.
                        self._more_held_out = itertools.islice(self._read_held_out_documents(), number, None)
                        raise
                    if document is None:
                        return
                    self._held_out.append(document)
            yield self._held_out[number]

    def _read_held_out_documents(self) -> Iterator[bytes]:
        shards = self.open_shards(VALIDATION)
        for shard in range(shards.num_shards):
            for text, _ in shards.read_documents(shard, None):
                document = text.encode()
                if self._fraction is None or self.is_held_out(document):
                    yield document
        if not self._held_out:
            raise UserError(
                f'{self.name} has no validation documents; set a larger VALIDATION_FRACTION, HF_VALIDATION_SPLIT, or '
                'EVAL_PERIOD = None'
            )


class ShardReader:
    """Reads the training documents of the shards with indices `shards`, starting from any position.

    Iterators in several threads may share a reader. If `seed` is set, the shards are repeated forever, shuffled anew in
    each epoch; if it is None, they are read once, in order.
    """

    def __init__(self, corpus: StreamedCorpus, shards: Sequence[int], seed: str | None):
        self._corpus, self._shards, self._seed = corpus, shards, seed
        self._lock = threading.Lock()
        self._position: bytes | None = None
        self._documents: Iterator[tuple[bytes, bytes]] = iter(())

    def read_document_after(self, position: bytes) -> tuple[bytes, bytes, bool]:
        """Returns the position after the next document, the document, and whether the end has been reached.

        Raises UserError if a shard cannot be read, or if an epoch has no document.
        """
        with self._lock:
            if position != self._position:
                self._documents = self._read_from_position(position)
            # Unsets the position, so that the shards are reopened if the next line raises an error.
            self._position = None
            after, document = next(self._documents, (position, None))
            self._position = after
        return after, document or b'', document is None

    def _read_from_position(self, position: bytes) -> Iterator[tuple[bytes, bytes]]:
        epoch, finished, state = json.loads(position) if position != START_POSITION else (0, 0, None)
        shards = self._corpus.open_shards(TRAIN)
        while True:
            is_whole, is_empty = not finished and state is None, True
            for turn, shard in list(enumerate(self._order_shards(epoch)))[finished:]:
                for text, after in shards.read_documents(shard, state):
                    document = text.encode()
                    if not self._corpus.is_held_out(document):
                        is_empty = False
                        yield json.dumps([epoch, turn, after]).encode(), document
                state = None
            if is_whole and is_empty:
                raise UserError(
                    f'{self._corpus.name} has no documents to train on in {len(self._shards)} of its '
                    f'{shards.num_shards} shards; use a dataset with text, a smaller VALIDATION_FRACTION, or fewer '
                    'STREAMS'
                )
            if self._seed is None:
                return
            epoch, finished = epoch + 1, 0

    def _order_shards(self, epoch: int) -> Sequence[int]:
        if self._seed is None:
            return self._shards
        # The order is computed with a hash, because NumPy's generators may differ between versions.
        return sorted(self._shards, key=lambda shard: hashlib.sha256(f'{self._seed} {epoch} {shard}'.encode()).digest())
