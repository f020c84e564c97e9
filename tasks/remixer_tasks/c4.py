"""C4 (Raffel et al. 2020), or any TensorFlow Dataset with a text, as a corpus.

The dataset must lie prepared under TFDS_DATA_DIR (or seqio's override, or ~/tensorflow_datasets): preparing C4 takes
a cluster, so it is never started from here.
"""

import dataclasses
import os
import warnings
from collections.abc import Iterator
from typing import Any

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

from remixer_t5x.errors import UserError
from remixer_tasks.text.text_corpus import TRAIN, VALIDATION


@dataclasses.dataclass(frozen=True)
class TfdsCorpus:
    """A prepared TensorFlow Dataset with a feature 'text' and the given splits (TFDS slices are fine).

    name: dataset, config and version, as in 'c4/en:3.1.0'.
    data_dir: where it lies; None leaves that to TFDS_DATA_DIR.
    """

    name: str
    data_dir: str | None
    train: str
    validation: str

    @property
    def identity(self) -> str:
        return repr(self)

    def source(self) -> 'TfdsSource':
        return TfdsSource(self)

    def training_documents(self) -> Iterator[str]:
        for example in self.source().get_dataset(TRAIN, shuffle=False).as_numpy_iterator():
            yield example['text'].decode('utf-8', 'replace')


class TfdsSource(seqio.TfdsDataSource):
    """seqio's TFDS source, which never prepares a dataset and says in one line when there is none.

    Reports no number of examples: seqio would then cache small datasets in memory with an op that has no symbolic
    checkpoint.
    """

    def __init__(self, corpus: TfdsCorpus):
        self._corpus = corpus
        splits = {TRAIN: corpus.train, VALIDATION: corpus.validation}
        super().__init__(corpus.name, tfds_data_dir=corpus.data_dir, read_only=True, splits=splits)
        self._tfds_dataset = _SequentialLoader(corpus.name, corpus.data_dir, splits, read_only=True)

    def num_input_examples(self, split: str) -> None:
        return None

    def list_shards(self, split: str) -> list[str]:
        try:
            return super().list_shards(split)
        except Exception as error:
            raise self._explain(error) from error

    def get_dataset(self, *args: Any, **kwargs: Any) -> tf.data.Dataset:
        try:
            with warnings.catch_warnings():
                # TFDS asks for a deterministic order, which an interleave in one thread has anyway.
                warnings.filterwarnings('ignore', 'The `deterministic` argument has no effect')
                return super().get_dataset(*args, **kwargs)
        except Exception as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> UserError:
        folder = self.tfds_dataset.data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
        reason = ' '.join(str(error).split())[:120]
        return UserError(
            f'TFDS dataset {self._corpus.name} cannot be read from {folder} ({reason}): set TFDS_DATA_DIR '
            'to the folder that holds it, or another c4.corpus.name'
        )


class _SequentialLoader(seqio.LazyTfdsLoader):
    """Interleaves files in one thread, see `text_corpus.TextSource`."""

    @property
    def read_config(self) -> tfds.ReadConfig:
        return dataclasses.replace(super().read_config, num_parallel_calls_for_interleave_files=None)


def corpus(
    name: str = 'c4/en:3.1.0',
    data_dir: str | None = None,
    train: str = 'train',
    validation: str = 'validation',
) -> TfdsCorpus:
    """C4, or another TFDS dataset whose examples have a 'text'; see `TfdsCorpus`. Opens nothing."""
    return TfdsCorpus(name, data_dir, train, validation)
