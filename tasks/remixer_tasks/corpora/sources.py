"""seqio data sources of parsed, streamed and TFDS corpora. Importing this module imports seqio.

The sources do not report their number of examples, because seqio would then cache small corpora with `Dataset.cache`,
whose position cannot be saved.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf, tfds
from remixer_tasks.corpora.streamed_text import START_POSITION, Reader, StreamedCorpus
from remixer_tasks.corpora.text_corpus import TRAIN, VALIDATION, ParsedCorpus


class TextSource(seqio.DataSource):
    """seqio source of a `ParsedCorpus`. `task_batches` sets `repeats` so that a shuffled dataset repeats forever."""

    repeats = False
    supports_arbitrary_sharding = True

    def __init__(self, corpus: ParsedCorpus, order: int = 0):
        """`order` is added to every seed, so that two sources of the same corpus are shuffled differently."""
        self._corpus, self._order = corpus, order
        super().__init__((TRAIN, VALIDATION), performs_internal_shuffling=True)

    def list_shards(self, split: str) -> list[str]:
        return self._corpus.files(split)

    def get_dataset(
        self,
        split: str = TRAIN,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **_: Any,
    ) -> tf.data.Dataset:
        """Returns a dataset of {'text': UTF-8 scalar}, infinite if `repeats`; ignores seqio's other arguments."""
        if shuffle:
            seed = (np.random.default_rng().integers(2**31).item() if seed is None else seed) + self._order
        dataset = self._corpus.documents(split).dataset(seed if shuffle else None, shard_info, shuffle and self.repeats)
        return dataset.map(lambda text: {'text': text})


class StreamedSource(seqio.DataSource):
    """seqio source of a `StreamedCorpus`; the position in the training split can be saved in checkpoints."""

    # If this is False and there are more hosts than shards, seqio makes every host read all data.
    supports_arbitrary_sharding = True

    def __init__(self, corpus: StreamedCorpus, order: int = 0):
        """Sources with different values of `order` read the shards in different orders for the same seed."""
        self._corpus, self._order = corpus, order
        super().__init__((TRAIN, VALIDATION))

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
        """Returns a dataset of {'text': UTF-8 scalar}; ignores seqio's other arguments.

        If `shuffle` is True, the training documents repeat forever, with a new order of the shards in each epoch.
        """
        shard = shard_info or seqio.ShardInfo(0, 1)
        if split == TRAIN:
            return self._training_dataset(shard, f'{seed} {self._order}' if shuffle else None)
        held_out = tf.data.Dataset.from_generator(
            lambda: ({'text': document} for document in self._corpus.held_out()),
            output_signature={'text': tf.TensorSpec((), tf.string)},
        )
        return held_out.shard(shard.num_shards, shard.index)

    def _training_dataset(self, shard: seqio.ShardInfo, seed: str | None) -> tf.data.Dataset:
        count = self._corpus.shards(TRAIN).count
        if count < shard.num_shards:
            raise UserError(
                f'STREAMS must be at most {count}, the number of shards of {self._corpus.name}, got {shard.num_shards} '
                '(the default is the number of hosts); set a smaller STREAMS, or write the data as more files'
            )
        reader = Reader(self._corpus, range(shard.index, count, shard.num_shards), seed)

        def read_next(position: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
            kinds = [tf.string, tf.string, tf.bool]
            # The operation is stateless, because the next document depends only on `position`. tf.data can therefore
            # save its state.
            after, text, is_end = tf.numpy_function(reader.after, [position], kinds, stateful=False)
            for tensor in (after, text, is_end):
                tensor.set_shape([])
            return after, (text, is_end)

        documents = tf.data.Dataset.counter().scan(START_POSITION, read_next).take_while(lambda text, is_end: ~is_end)
        return documents.map(lambda text, is_end: {'text': text})


class TfdsSource(seqio.TfdsDataSource):
    """TFDS data source of seqio that never prepares a data set, and raises UserError if data cannot be read."""

    def __init__(self, name: str, data_dir: str | None, splits: Mapping[str, str], order: int = 0):
        """`order` is added to every seed, so that two sources of the same corpus are shuffled differently."""
        self._order = order
        self._name = name
        super().__init__(name, tfds_data_dir=data_dir, read_only=True, splits=splits)
        self._tfds_dataset = _SequentialLoader(name, data_dir, splits, read_only=True)

    def num_input_examples(self, split: str) -> None:
        return None

    def list_shards(self, split: str) -> list[str]:
        try:
            return super().list_shards(split)
        except Exception as error:
            raise self._unreadable_error(error) from error

    def get_dataset(self, *args: Any, **kwargs: Any) -> tf.data.Dataset:
        if kwargs.get('seed') is not None:
            kwargs['seed'] += self._order
        try:
            with warnings.catch_warnings():
                # The warning is irrelevant, because an interleave in one thread is always deterministic.
                warnings.filterwarnings('ignore', 'The `deterministic` argument has no effect')
                return super().get_dataset(*args, **kwargs)
        except Exception as error:
            raise self._unreadable_error(error) from error

    def _unreadable_error(self, error: Exception) -> UserError:
        folder = self.tfds_dataset.data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
        reason = ' '.join(str(error).split())[:120]
        return UserError(
            f'TFDS data set {self._name} cannot be read from {folder} ({reason}); set TFDS_DATA_DIR to the folder that '
            'contains it, or use another c4.corpus.name'
        )


class _SequentialLoader(seqio.LazyTfdsLoader):
    """TFDS loader of seqio that reads in one thread without a memory cache, so that tf.data can save its position."""

    @property
    def read_config(self) -> tfds.ReadConfig:
        return dataclasses.replace(
            super().read_config, num_parallel_calls_for_interleave_files=None, try_autocache=False
        )
