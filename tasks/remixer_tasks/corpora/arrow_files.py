"""Writes documents to Arrow files, and reads them by index from memory-mapped files in a seeded random order.

A file has two columns: the text, and its hash (see `text_corpus.hash_to_fraction`), which is also a checksum. The hash
selects the held-out documents, unless a third column contains the hash of each document's split key.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from remixer_t5x.errors import UserError, root_cause_message
from remixer_t5x.lazy_imports import seqio, tf
from remixer_tasks.corpora.text_corpus import hash_to_fraction

_SCHEMA = pa.schema([('text', pa.large_binary()), ('share', pa.float64())])
_KEYED_SCHEMA = _SCHEMA.append(pa.field('key_share', pa.float64()))
_NOTES = b'notes'
# Minimum size in bytes of the text in a record batch, except in the last batch.
_BATCH_BYTES = 4 << 20
# Number of documents per call from tf.data to Python, to amortize the overhead of the call.
_LOOKUP_BATCH = 64


def write_documents(path: Path, documents: Iterable[tuple[bytes, bytes | None]], notes: Callable[[], str]) -> None:
    """Writes (text, split key) pairs to a new file, followed by the string that `notes()` returns.

    Either all split keys or none must be None. A document without a key is assigned to a split by the hash of its text.
    """
    rows = iter(documents)
    first = [*itertools.islice(rows, 1)]
    schema = _KEYED_SCHEMA if first and first[0][1] is not None else _SCHEMA
    with pa.OSFile(str(path), 'wb') as file, pa.ipc.new_file(file, schema) as writer:
        batch: list[tuple[bytes, bytes | None]] = []
        size = 0
        for row in itertools.chain(first, rows):
            batch.append(row)
            size += len(row[0])
            if size >= _BATCH_BYTES:
                writer.write_batch(_build_record_batch(batch, schema))
                batch, size = [], 0
        writer.write_batch(_build_record_batch(batch, schema), {_NOTES: notes().encode()})


def _build_record_batch(rows: Sequence[tuple[bytes, bytes | None]], schema: pa.Schema) -> pa.RecordBatch:
    texts, keys = [text for text, _ in rows], [key for _, key in rows if key is not None]
    columns = [
        pa.array(texts, pa.large_binary()),
        *(pa.array(map(hash_to_fraction, c), pa.float64()) for c in (texts, keys)),
    ]
    return pa.record_batch(columns[: len(schema)], schema)


def read_notes(path: Path) -> str:
    """Returns the notes that `write_documents` stored in a file. Raises OSError or ValueError for a damaged file."""
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        _, notes = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    return notes[_NOTES].decode()


class ArrowDocuments:
    """Random access to the documents of Arrow files by index.

    Args:
        paths: files written by `write_documents`.
        rows: indices of the documents to include, counted across all files; None includes all.
        repair: advice to print in the error message if a file is damaged.
    """

    def __init__(self, paths: Sequence[Path], rows: np.ndarray | None = None, repair: str = 'write it again'):
        self._batches: list[tuple[Any, Path]] = []
        for path in paths:
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
                batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            except (pa.ArrowException, OSError) as error:
                raise UserError(f'{path} is damaged ({root_cause_message(error)}); {repair}') from error
            self._batches += [(batch, path) for batch in batches]
        self._starts: np.ndarray = np.cumsum([0, *(batch.num_rows for batch, _ in self._batches)])
        self._rows = rows
        self._repair = repair

    def __len__(self) -> int:
        return int(self._starts[-1]) if self._rows is None else len(self._rows)

    def get_hash_fractions(self, column: int = 1) -> np.ndarray:
        """Returns the hash fraction of each text, or of each split key if `column` is -1 and the files have keys."""
        return np.concatenate([np.zeros(0), *(batch.columns[column].to_numpy() for batch, _ in self._batches)])

    def read_documents(self, indices: np.ndarray) -> np.ndarray:
        """Returns the documents at these indices, as an array of bytes. Raises UserError for a damaged document."""
        rows = indices if self._rows is None else self._rows[indices]
        batches = np.searchsorted(self._starts, rows, side='right') - 1
        documents: Any = np.empty(len(rows), object)
        for number, (batch, row) in enumerate(zip(batches.tolist(), rows.tolist(), strict=True)):
            columns, path = self._batches[batch]
            offset = row - int(self._starts[batch])
            documents[number] = columns[0][offset].as_py()
            if hash_to_fraction(documents[number]) != columns[1][offset].as_py():
                raise UserError(f'{path} is damaged; {self._repair}')
        return documents

    def build_dataset(
        self, seed: int | None, shard: seqio.ShardInfo | None = None, repeat: bool = False
    ) -> tf.data.Dataset:
        """Returns a dataset of a shard's documents as scalar strings.

        A position counts documents across all shards and epochs. The epoch `position // len` and the seed determine a
        permutation, and `position % len` is an index in this permutation. All shards together therefore contain every
        document once per epoch, in the same order for any number of shards. Only the first epoch of a shuffled dataset
        without `repeat` can be restored, because TensorFlow 2.21 does not save the iteration count.

        Args:
            seed: seed of the order; None keeps the order of the files.
            shard: selects every `num_shards`-th position.
            repeat: whether to repeat forever, in a different order in each epoch.
        """
        first, step = (shard.index, shard.num_shards) if shard else (0, 1)
        count = len(self)
        if not count:
            return tf.data.Dataset.from_tensor_slices(tf.zeros([0], tf.string))

        def build_epoch(epoch: tf.Tensor | int) -> tf.data.Dataset:
            return tf.data.Dataset.range(first, count, step).map(lambda position: position + epoch * count)

        def shuffle_position(position: tf.Tensor) -> tf.Tensor:
            # Computes the permutation index by index, without storing it.
            keys = tf.stack([tf.constant(seed, tf.int64), position // count])
            return tf.random.experimental.index_shuffle(position % count, keys, tf.constant(count - 1, tf.int64))

        if seed is None:
            indices = tf.data.Dataset.range(first, count, step)
        elif repeat:
            indices = tf.data.Dataset.counter(first, step).map(shuffle_position)
        else:
            epoch = tf.data.Dataset.random(seed, rerandomize_each_iteration=True).take(1)
            indices = epoch.flat_map(lambda epoch: build_epoch(epoch % 2**20)).map(shuffle_position)

        def look_up_documents(indices: tf.Tensor) -> tf.data.Dataset:
            texts = tf.numpy_function(self.read_documents, [indices], tf.string, stateful=False)
            return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(texts, [None]))

        # Batches contain indices, so a saved position does not contain the texts of documents.
        return indices.batch(_LOOKUP_BATCH).flat_map(look_up_documents)
