"""C4 (Raffel et al. 2020), or another prepared TensorFlow Dataset with a feature 'text', as a corpus."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from remixer_t5x import tf_data
from remixer_t5x.lazy_imports import seqio
from remixer_tasks.benchmarks import text_task
from remixer_tasks.corpora.text_corpus import TRAIN, VALIDATION


@dataclasses.dataclass(frozen=True)
class TfdsCorpus:
    """A prepared TensorFlow Dataset with a feature 'text'; `train` and `validation` are TFDS splits or slices."""

    name: str
    data_dir: str | None
    train: str
    validation: str

    @property
    def training_data_key(self) -> str:
        folder = text_task.get_tfds_root(self.data_dir)
        return repr(dataclasses.replace(self, data_dir=folder if '://' in folder else os.path.abspath(folder)))

    def create_source(self, order: int = 0) -> seqio.DataSource:
        # Imported lazily, because `sources` imports seqio.
        from remixer_tasks.corpora.sources import TfdsSource

        return TfdsSource(self.name, self.data_dir, {TRAIN: self.train, VALIDATION: self.validation}, order)

    def read_training_documents(self) -> Iterator[str]:
        for example in tf_data.iterate_as_numpy(self.create_source().get_dataset(TRAIN, shuffle=False)):
            yield example['text'].decode('utf-8', 'replace')


def corpus(
    name: str = 'c4/en:3.1.0', data_dir: str | None = None, train: str = 'train', validation: str = 'validation'
) -> TfdsCorpus:
    """Returns C4, or another TFDS dataset with a feature 'text', without opening a file.

    `data_dir` is the folder of the prepared dataset; None uses TFDS_DATA_DIR.
    """
    return TfdsCorpus(name, data_dir, train, validation)
