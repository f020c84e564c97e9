"""Arrow files of documents: written once, memory-mapped, and read by index in a seeded random order.

A file has two columns: the text, and its share (see `text_corpus.share_of`), which decides whether the document is held
out, and is its checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.corpora.text_corpus import share_of

_SCHEMA = pa.schema([('text', pa.large_binary()), ('share', pa.float64())])
_NOTES = b'notes'
# Bytes of text in a record batch.
_BATCH_BYTES = 4 << 20
# Documents that are looked up at once, because a call of Python takes longer than finding a document.
_TOGETHER = 64


def write(path: Path, documents: Iterable[bytes], notes: Callable[[], str]) -> None:
    """Writes the documents to a new file; `notes()` is called after the last one, and stored with them."""
    with pa.OSFile(str(path), 'wb') as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        texts: list[bytes] = []
        size = 0
        for text in documents:
            texts.append(text)
            size += len(text)
            if size >= _BATCH_BYTES:
                writer.write_batch(_batch(texts))
                texts, size = [], 0
        writer.write_batch(_batch(texts), {_NOTES: notes().encode()})


def _batch(texts: Sequence[bytes]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(texts, pa.large_binary()), pa.array(map(share_of, texts), pa.float64())], _SCHEMA)


def read_notes(path: Path) -> str:
    """What `write` stored with the documents. Raises OSError or ValueError for a damaged file."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        _, notes = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    return notes[_NOTES].decode()


class Documents:
    """The documents of some files, by index.

    Args:
        paths: of files that `write` made.
        rows: which documents, by their place in all files together; None is all of them.
        repair: what to do about a damaged file, for messages.
    """

    def __init__(self, paths: Sequence[Path], rows: np.ndarray | None = None, repair: str = 'make it again'):
        self._batches: list[tuple[Any, Any, Path]] = []
        for path in paths:
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            except (pa.ArrowException, OSError) as error:
                raise UserError(f'{path} is damaged; {repair}') from error
            self._batches += [(batch.column(0), batch.column(1), path) for batch in batches]
        self._starts: np.ndarray = np.cumsum([0, *(len(shares) for _, shares, _ in self._batches)])
        self._rows = rows
        self._repair = repair

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._rows is None else len(self._rows)

    def shares(self) -> np.ndarray:
        """The share of every document of the files."""
        shares = [column.to_numpy() for _, column, _ in self._batches]
        return np.concatenate(shares) if shares else np.zeros(0)

    def at(self, indices: np.ndarray) -> np.ndarray:
        """The documents with these indices, as an array of bytes. Raises UserError for a damaged one."""
        rows = indices if self._rows is None else self._rows[indices]
        batches = np.searchsorted(self._starts, rows, side='right') - 1
        found: Any = np.empty(len(rows), object)
        for number, (batch, row) in enumerate(zip(batches.tolist(), rows.tolist(), strict=True)):
            texts, shares, path = self._batches[batch]
            place = row - int(self._starts[batch])
            found[number] = texts[place].as_py()
            if share_of(found[number]) != shares[place].as_py():
                raise UserError(f'{path} is damaged; {self._repair}')
        return found

    def dataset(self, seed: int | None, share: seqio.ShardInfo | None = None, repeat: bool = False) -> tf.data.Dataset:
        """The documents of a share as scalars.

        Its position is one number, and the documents at hand are a function of it: `place % len` in a permutation that
        the seed and the epoch, `place // len`, decide. So the shares together have every document exactly once in each
        epoch, in the same order for any number of shares.

        Args:
            seed: of the order; None is the order of the files.
            share: takes every `num_shards`-th place.
            repeat: without end, every epoch in another order. Otherwise each iteration over the dataset is one epoch.
        """
        first, step = (share.index, share.num_shards) if share else (0, 1)
        count = len(self)
        if not count:
            return tf.data.Dataset.from_tensor_slices(tf.zeros([0], tf.string))
        once = tf.data.Dataset.range(first, count, step)
        if repeat:
            places = tf.data.Dataset.counter(first, step)
        elif seed is None:
            places = once
        else:
            epoch = tf.data.Dataset.random(seed, rerandomize_each_iteration=True).take(1)
            places = epoch.flat_map(lambda epoch: once.map(lambda place: place + epoch % 2**20 * count))

        def index(place: tf.Tensor) -> tf.Tensor:
            # The permutation is computed one index at a time, so nothing is kept of an epoch.
            order = tf.stack([tf.constant(seed, tf.int64), place // count])
            return tf.random.experimental.index_shuffle(place % count, order, tf.constant(count - 1, tf.int64))

        def look_up(indices: tf.Tensor) -> tf.data.Dataset:
            texts = tf.numpy_function(self.at, [indices], tf.string, stateful=False)
            return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(texts, [None]))

        indices = places.map(lambda place: place % count) if seed is None else places.map(index)
        # A saved position has the indices of these documents, and not their texts.
        return indices.batch(_TOGETHER).flat_map(look_up)
