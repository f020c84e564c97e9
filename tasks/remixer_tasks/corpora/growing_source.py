"""Reads a corpus that is still being written. Importing this module loads seqio."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from remixer_t5x.lazy import seqio, tf
from remixer_tasks.corpora.growing_text import GrowingCorpus
from remixer_tasks.corpora.text_shards import SHARDS
from remixer_tasks.corpora.volumes import TRAIN, VALIDATION
from remixer_tasks.files import cache

# Files that all streams together read in turn, and among which the next is drawn: a quarter of a volume, so that the
# first batch needs the first volume alone.
_TOGETHER = SHARDS // 4


class GrowingSource(seqio.DataSource):
    """seqio source of a `growing_text.GrowingCorpus`, whose position can be saved and restored."""

    def __init__(self, corpus: GrowingCorpus, order: int = 0):
        """`order` is added to every seed."""
        self._corpus, self._order = corpus, order
        super().__init__((TRAIN, VALIDATION))

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return True

    def list_shards(self, split: str) -> list[str]:
        """The user's files, by which a resumed run notices other text: they are there before they are read."""
        return list(self._corpus.files(split))

    def records(self, split: str) -> Sequence[str]:
        """The files that TensorFlow reads, as far as they are there."""
        return [path for path in self._corpus.shards(split) if os.path.exists(path)]

    def repair(self, path: str) -> str:
        """What to do about a damaged file of the source."""
        return cache.repair(self._corpus.folder)

    def mend(self, error: str) -> bool:
        """Waits for a volume of a saved position, if the cache was emptied; returns whether another try is worth it."""
        missing = [path for path in self._corpus.shards(TRAIN) if path in error and not os.path.exists(path)]
        for path in missing:
            while not self._corpus.is_there(path):
                pass
        return bool(missing)

    def get_dataset(
        self,
        split: str = TRAIN,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **_: Any,
    ) -> tf.data.Dataset:
        """{'text': UTF-8 scalar}, volume after volume; `shuffle` draws each file among the next ones, another one in
        every epoch. `_`: what seqio's sources take and do not use."""
        files = tf.data.Dataset.from_tensor_slices(self._corpus.shards(split))
        share = shard_info or seqio.ShardInfo(0, 1)
        files, together = files.shard(share.num_shards, share.index), max(1, _TOGETHER // share.num_shards)
        if shuffle:
            files = files.shuffle(together, seed=None if seed is None else seed + self._order)

        def as_example(record: tf.Tensor) -> dict[str, tf.Tensor]:
            return {'text': record}

        files = files.flat_map(self._once_there)
        return files.interleave(tf.data.TFRecordDataset, cycle_length=together, block_length=16).map(as_example)

    def _once_there(self, path: tf.Tensor) -> tf.data.Dataset:
        """The path, when its file is there. Looks again and again, so that tf.data can be stopped meanwhile."""

        def is_there(path: tf.Tensor) -> tf.Tensor:
            found = tf.numpy_function(self._is_there, [path], tf.bool, stateful=False)
            found.set_shape([])
            return found

        return tf.data.Dataset.from_tensors(path).repeat().filter(is_there).take(1)

    def _is_there(self, path: bytes) -> bool:
        return self._corpus.is_there(path.decode())
