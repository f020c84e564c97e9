"""seqio data sources of corpora and of labelled datasets. Importing this module imports seqio.

The sources do not report their number of examples, because seqio would then cache small corpora with `Dataset.cache`,
whose position cannot be saved. Examples are shuffled before they are repeated, so every epoch contains each example
once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf, tfds
from remixer_tasks.benchmarks import text_task
from remixer_tasks.benchmarks.text_task import INTEGER, REAL, TEXT, TEXTS, Example, LabelledDataset
from remixer_tasks.corpora import arrow_files
from remixer_tasks.corpora.streamed_text import START_POSITION, ShardReader, StreamedCorpus
from remixer_tasks.corpora.text_corpus import TRAIN, VALIDATION, ParsedCorpus
from remixer_tasks.files import cache
from remixer_tasks.files.cache import ProgressNotice

# Number of TFDS examples in the shuffle buffer. Every saved position contains this buffer (a few kB per example).
SHUFFLE_BUFFER = 256
# Every stream reads all files of a TFDS dataset with at most this number of examples, so that all streams together
# yield each example once per epoch.
_MAX_UNSHARDED_EXAMPLES = 1_000_000
_ROWS = 'rows.arrow'
_DTYPES = {TEXT: tf.string, TEXTS: tf.string, INTEGER: tf.int64, REAL: tf.float32}


class CorpusTask(seqio.Task):
    """A task on a corpus. Adds `order` to the seed that shuffles its cache; the source adds it to its own seeds."""

    def __init__(self, *args: Any, order: int, **kwargs: Any):
        self._order = order
        super().__init__(*args, **kwargs)

    def get_dataset(
        self, *args: Any, use_cached: bool = False, seed: int | None = None, **kwargs: Any
    ) -> tf.data.Dataset:
        if use_cached and seed is not None:
            seed += self._order
        return super().get_dataset(*args, use_cached=use_cached, seed=seed, **kwargs)


class TextSource(seqio.DataSource):
    """seqio source of a `ParsedCorpus`. `task_batches` sets `repeats` so that a shuffled dataset repeats forever."""

    repeats = False
    supports_arbitrary_sharding = True

    def __init__(self, corpus: ParsedCorpus, order: int = 0):
        """`order` is added to every seed, so that two sources of the same corpus are shuffled differently."""
        self._corpus, self._order = corpus, order
        super().__init__((TRAIN, VALIDATION), performs_internal_shuffling=True)

    def count_examples(self, split: str) -> int:
        """Returns the number of documents, or of pairs of texts, in the split."""
        return len(self._corpus.open_documents(split))

    def list_shards(self, split: str) -> list[str]:
        return self._corpus.list_files(split)

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
            seed = _choose_seed(seed) + self._order
        dataset = self._corpus.open_documents(split).build_dataset(
            seed if shuffle else None, shard_info, shuffle and self.repeats
        )
        return dataset.map(lambda text: {'text': text})


def _choose_seed(seed: int | None) -> int:
    """Returns `seed`, or a random seed if it is None."""
    return np.random.default_rng().integers(2**31).item() if seed is None else seed


class StreamedSource(seqio.DataSource):
    """seqio source of a `StreamedCorpus`; the position in the training split can be saved in checkpoints."""

    # If this is False and there are more hosts than shards, seqio makes every host read all data.
    supports_arbitrary_sharding = True

    def __init__(self, corpus: StreamedCorpus, order: int = 0):
        """Sources with different values of `order` read the shards in different orders for the same seed."""
        self._corpus, self._order = corpus, order
        super().__init__((TRAIN, VALIDATION))

    def list_shards(self, split: str) -> list[str]:
        return list(self._corpus.open_shards(split).files)

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
            return self._build_training_dataset(shard, f'{seed} {self._order}' if shuffle else None)
        held_out = tf.data.Dataset.from_generator(
            lambda: ({'text': document} for document in self._corpus.get_held_out_documents()),
            output_signature={'text': tf.TensorSpec((), tf.string)},
        )
        return held_out.shard(shard.num_shards, shard.index)

    def _build_training_dataset(self, shard: seqio.ShardInfo, seed: str | None) -> tf.data.Dataset:
        count = self._corpus.open_shards(TRAIN).num_shards
        if count < shard.num_shards:
            raise UserError(
                f'STREAMS must be at most {count}, the number of shards of {self._corpus.name}, got {shard.num_shards} '
                '(the default is the number of hosts); set a smaller STREAMS, or write the data as more files'
            )
        reader = ShardReader(self._corpus, range(shard.index, count, shard.num_shards), seed)

        def read_next_document(position: tf.Tensor, _: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, tf.Tensor]]:
            kinds = [tf.string, tf.string, tf.bool]
            # The operation is declared stateless, because the next document depends only on `position`. tf.data can
            # save only such operations.
            after, text, is_end = tf.numpy_function(reader.read_document_after, [position], kinds, stateful=False)
            for tensor in (after, text, is_end):
                tensor.set_shape([])
            return after, (text, is_end)

        documents = (
            tf.data.Dataset.counter().scan(START_POSITION, read_next_document).take_while(lambda text, is_end: ~is_end)
        )
        return documents.map(lambda text, is_end: {'text': text})


class TfdsSource(seqio.TfdsDataSource):
    """seqio's TFDS data source, changed to never prepare a dataset, and to raise UserError for unreadable data."""

    def __init__(self, name: str, data_dir: str | None, splits: Mapping[str, str], order: int = 0):
        """`order` is added to every seed, so that two sources of the same corpus are shuffled differently."""
        self._order = order
        self._name = name
        super().__init__(name, tfds_data_dir=data_dir, read_only=True, splits=splits)
        self._tfds_dataset = _UncachedLoader(name, data_dir, splits, read_only=True)

    def num_input_examples(self, split: str) -> None:
        return None

    def list_shards(self, split: str) -> list[str]:
        try:
            return super().list_shards(split)
        except Exception as error:
            raise self._build_unreadable_error(error) from error

    def get_dataset(self, *args: Any, **kwargs: Any) -> tf.data.Dataset:
        if kwargs.get('seed') is not None:
            kwargs['seed'] += self._order
        try:
            return super().get_dataset(*args, **kwargs)
        except Exception as error:
            raise self._build_unreadable_error(error) from error

    def _build_unreadable_error(self, error: Exception) -> UserError:
        folder = text_task.get_tfds_root(self.tfds_dataset.data_dir)
        reason = ' '.join(str(error).split())[:120]
        return UserError(
            f'TFDS dataset {self._name} cannot be read from {folder} ({reason}); set TFDS_DATA_DIR to the folder that '
            'contains it, or correct the arguments name, train and validation of c4.corpus'
        )


class _UncachedLoader(seqio.LazyTfdsLoader):
    """seqio's TFDS loader without memory cache, so that tf.data can save its position."""

    @property
    def read_config(self) -> tfds.ReadConfig:
        return dataclasses.replace(super().read_config, try_autocache=False)


class LabelledSource(seqio.DataSource):
    """seqio data source of a `LabelledDataset`: a prepared TFDS dataset, or else the published files.

    Published files are parsed when they are first needed; the cached rows are read by index.
    Call `count_examples` for the number of examples. `task_batches` sets `repeats` so that a shuffled dataset repeats
    forever.
    """

    repeats = False
    supports_arbitrary_sharding = True

    def __init__(self, dataset: LabelledDataset, splits: tuple[str, ...], data_dir: str | None = None):
        self._dataset, self._data_dir = dataset, data_dir
        super().__init__(splits, performs_internal_shuffling=True)

    def find_origin(self, split: str) -> str | None:
        """Returns the TFDS folder or the files of the split, or None if the split has no data."""
        folder = self._find_tfds_folder(split)
        if folder:
            return folder
        raw = text_task.find_published_files(self._dataset, split, self._data_dir)
        return ', '.join(raw[1]) if raw else None

    def count_examples(self, split: str) -> int:
        """Returns the number of examples before preprocessing. Raises UserError if there are none."""
        folder = self._find_tfds_folder(split)
        return self._read_tfds_info(folder, split).num_examples if folder else len(self._open_parsed_rows(split))

    def list_shards(self, split: str) -> list[str]:
        folder = self._find_tfds_folder(split)
        if folder:
            return [os.fspath(path) for path in self._read_tfds_info(folder, split).filepaths]
        return [str(self._parse_files(split) / _ROWS)]

    def get_dataset(
        self,
        split: str = TRAIN,
        shuffle: bool = True,
        seed: int | None = None,
        shard_info: seqio.ShardInfo | None = None,
        **_: Any,
    ) -> tf.data.Dataset:
        """Returns a dataset of examples as flat dicts; ignores seqio's other arguments."""
        if shuffle:
            seed = _choose_seed(seed)
        folder = self._find_tfds_folder(split)
        if folder:
            return self._load_tfds_dataset(folder, split, shuffle, seed, shard_info or seqio.ShardInfo(0, 1))
        rows = self._open_parsed_rows(split).build_dataset(
            seed if shuffle else None, shard_info, shuffle and self.repeats
        )
        return rows.map(self._parse_example)

    def _load_tfds_dataset(
        self, folder: str, split: str, shuffle: bool, seed: int | None, shard: seqio.ShardInfo
    ) -> tf.data.Dataset:
        info = self._read_tfds_info(folder, split)
        is_whole = shuffle and self.repeats and shard.num_shards > 1 and info.num_examples <= _MAX_UNSHARDED_EXAMPLES
        has_enough_files = len(info.filepaths) >= shard.num_shards and not is_whole
        config = tfds.ReadConfig(
            shuffle_seed=seed,
            interleave_cycle_length=16,
            num_parallel_calls_for_decode=1,
            try_autocache=False,
            input_context=tf.distribute.InputContext(shard.num_shards, shard.index) if has_enough_files else None,
        )
        builder = tfds.builder_from_directory(folder)
        examples = builder.as_dataset(split=split, shuffle_files=shuffle, read_config=config)
        if shuffle and is_whole:
            examples = examples.shuffle(SHUFFLE_BUFFER, seed=seed).repeat()
        if not has_enough_files:
            examples = examples.shard(shard.num_shards, shard.index)
        if shuffle and not is_whole:
            examples = examples.shuffle(SHUFFLE_BUFFER, seed=seed)
        return examples.map(self._flatten_example)

    def _find_tfds_folder(self, split: str) -> str | None:
        if split not in self.splits:
            raise UserError(f'the split of {self._dataset.name} must be one of {", ".join(self.splits)}, got {split!r}')
        return text_task.find_tfds_folder(self._dataset, self._data_dir)

    def _read_tfds_info(self, folder: str, split: str) -> tfds.core.SplitInfo:
        splits = tfds.builder_from_directory(folder).info.splits
        if split not in splits or not splits[split].num_examples:
            raise UserError(f'{folder} has no examples of split {split!r}; prepare the TFDS dataset again')
        return splits[split]

    def _flatten_example(self, example: Example) -> Example:
        flat = {}
        for name, kind in self._dataset.features.items():
            value = example
            for part in name.split('/'):
                value = value[part]
            flat[name] = tf.cast(value, _DTYPES[kind]) if kind in (INTEGER, REAL) else value
        return flat

    def _parse_example(self, record: tf.Tensor) -> Example:
        spec = {
            name: tf.io.RaggedFeature(tf.string) if kind == TEXTS else tf.io.FixedLenFeature([], _DTYPES[kind])
            for name, kind in self._dataset.features.items()
        }
        return tf.io.parse_single_example(record, spec)

    def _parse_files(self, split: str) -> Path:
        """Returns the cache folder of the split's parsed rows; parses the published files if necessary."""
        raw = text_task.find_published_files(self._dataset, split, self._data_dir)
        if raw is None:
            raise UserError(text_task.describe_missing_files(self._dataset, split, self._data_dir))
        layout, paths = raw
        states = [cache.read_file_state(path) for path in paths]
        name = cache.hash_cache_key('rows 3', self._dataset.name, split, sorted(self._dataset.features), states)
        folder = cache.get_cache_root() / 'rows' / name
        if not folder.exists():
            with cache.create_cache_entry(folder) as temporary:
                temporary.mkdir()
                notice = ProgressNotice(f'reading {self._dataset.name}, split {split}')
                records = [self._serialize_example(example) for example in layout.read(*paths)]
                if not records:
                    raise UserError(f'{", ".join(paths)} has no examples; download them again, or choose another split')
                arrow_files.write_documents(temporary / _ROWS, ((record, None) for record in records), lambda: '')
                notice.print_result(f'{len(records):,} examples')
                cache.mark_entry_complete(temporary)
        cache.check_file_sizes(folder)
        return folder

    def _open_parsed_rows(self, split: str) -> arrow_files.ArrowDocuments:
        folder = self._parse_files(split)
        return arrow_files.ArrowDocuments([folder / _ROWS], repair=cache.describe_repair(folder))

    def _serialize_example(self, example: Example) -> bytes:
        features = {name: _encode_feature(kind, example[name]) for name, kind in self._dataset.features.items()}
        return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(deterministic=True)


def _encode_feature(kind: str, value: Any) -> tf.train.Feature:
    if kind == INTEGER:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
    if kind == REAL:
        return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
    texts = value if kind == TEXTS else [value]
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode('utf-8', 'replace') for text in texts]))
