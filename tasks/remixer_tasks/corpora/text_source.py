"""seqio's sources of documents, for parsed and for streamed corpora. Importing this module loads seqio."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.corpora.streamed_text import START, Reader, StreamedCorpus
from remixer_tasks.corpora.text_corpus import TRAIN, VALIDATION, ParsedCorpus


class TextSource(seqio.DataSource):
    """The documents of a `ParsedCorpus`, with a position that can be saved.

    The number of examples stays unsaid: seqio would cache a small corpus in memory, with an op whose position cannot be
    saved.

    Attributes:
        repeats: whether a shuffled dataset has no end, so that all shares of it have exact epochs together; see
            `arrow_files.Documents.dataset`.
    """

    repeats = False

    def __init__(self, corpus: ParsedCorpus, order: int = 0):
        """`order` is added to every seed."""
        self._corpus, self._order = corpus, order
        super().__init__((TRAIN, VALIDATION), performs_internal_shuffling=True)

    @property
    def supports_arbitrary_sharding(self) -> bool:
        return True

    def list_shards(self, split: str) -> list[str]:
        return self._corpus.files(split)

    def records(self, split: str) -> list[str]:
        """Files that TensorFlow reads, and reports as damaged without their names: none."""
        return []

    def get_dataset(
        self,
        split: str = TRAIN,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **_: Any,
    ) -> tf.data.Dataset:
        """{'text': UTF-8 scalar}. `_`: what seqio's sources take and do not use."""
        if shuffle:
            seed = (np.random.default_rng().integers(2**31).item() if seed is None else seed) + self._order
        documents = self._corpus.documents(split)
        dataset = documents.dataset(seed if shuffle else None, shard_info, repeat=shuffle and self.repeats)
        return dataset.map(lambda text: {'text': text})


class StreamedSource(seqio.DataSource):
    """The documents of a `StreamedCorpus`, whose training split has a position that can be saved."""

    def __init__(self, corpus: StreamedCorpus, order: int = 0):
        """`order` gives another order of the shards for the same seed."""
        self._corpus, self._order = corpus, order
        super().__init__((TRAIN, VALIDATION))

    @property
    def supports_arbitrary_sharding(self) -> bool:
        # seqio would otherwise let every host read everything where there are more hosts than shards.
        return True

    def list_shards(self, split: str) -> list[str]:
        return list(self._corpus.shards(split).files)

    def get_dataset(
        self,
        split: str = TRAIN,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **_: Any,
    ) -> tf.data.Dataset:
        """{'text': UTF-8 scalar}. Training documents come without end if `shuffle`, each epoch with its shards in
        another order, and otherwise once. `_`: what seqio's sources take and do not use."""
        share = shard_info or seqio.ShardInfo(0, 1)
        if split == TRAIN:
            return self._training(share, f'{seed} {self._order}' if shuffle else None)
        example = {'text': tf.TensorSpec((), tf.string)}
        held_out = tf.data.Dataset.from_generator(self._held_out, output_signature=example)
        return held_out.shard(share.num_shards, share.index)

    def _held_out(self) -> Iterator[dict[str, bytes]]:
        return ({'text': document} for document in self._corpus.held_out())

    def _training(self, share: seqio.ShardInfo, seed: str | None) -> tf.data.Dataset:
        count = self._corpus.shards(TRAIN).count
        if count < share.num_shards:
            fewer = max(number for number in range(1, count + 1) if share.num_shards % number == 0)
            raise UserError(
                f'{self._corpus.name} has {count} shard{"s" if count > 1 else ""}, and the run reads it as '
                f'{share.num_shards} streams, one for each host: give STREAMS = {fewer}, so that several hosts read '
                'the same stream and keep their rows, or write the data as more files'
            )
        reader = Reader(self._corpus, range(share.index, count, share.num_shards), seed)

        def following(place: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
            kinds = [tf.string, tf.string, tf.bool]
            # Not stateful: what follows a place depends on the place alone, so tf.data may save a position here.
            after, text, is_end = tf.numpy_function(reader.after, [place], kinds, stateful=False)
            for tensor in (after, text, is_end):
                tensor.set_shape([])
            return after, (text, is_end)

        def goes_on(text: tf.Tensor, is_end: tf.Tensor) -> tf.Tensor:
            return ~is_end

        def without_end(text: tf.Tensor, is_end: tf.Tensor) -> dict[str, tf.Tensor]:
            return {'text': text}

        return tf.data.Dataset.counter().scan(START, following).take_while(goes_on).map(without_end)
