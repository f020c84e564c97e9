"""Defines dataclasses for text-to-text tasks, which combine a labelled dataset, a prompt, and metrics.

A dataset is read from TFDS or the published files. Both sources yield the same examples: flat dicts with the keys of
`Dataset.features`; nested names are joined by '/', as in 'idx/question'.

If `data_dir` is set, only that folder is searched, first for a prepared TFDS dataset and then for published files.
Otherwise the search order is TFDS_DATA_DIR (or ~/tensorflow_datasets), REMIXER_T5X_DATA, and `data` in the cache.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf
from remixer_tasks.files import cache
from remixer_tasks.vocabularies import load_vocabulary

TEXT, TEXTS, INTEGER, REAL = 'text', 'texts', 'integer', 'real'
TRAIN, VALIDATION, TEST = 'train', 'validation', 'test'

Example = dict[str, Any]
# A reader is called with the path of each file in the layout.
Reader = Callable[..., Iterator[Example]]
Metric = Callable[..., dict[str, float]]
Preprocessor: TypeAlias = 'Callable[[tf.data.Dataset], tf.data.Dataset]'


@dataclasses.dataclass(frozen=True)
class FileLayout:
    """The files of a published split (`paths` are relative to the data folder), and a function that reads them."""

    paths: tuple[str, ...]
    read: Reader


@dataclasses.dataclass(frozen=True)
class PublishedFile:
    """A public file and its SHA-256; the file is saved to (or if `unzip`, extracted to) `folder` in the data folder."""

    url: str
    sha256: str
    folder: str
    unzip: bool = False


@dataclasses.dataclass(frozen=True)
class LabelledDataset:
    """A labelled dataset.

    Attributes:
        features: maps feature names to TEXT, TEXTS (a list of any length), INTEGER or REAL.
        splits: maps each split to its file layouts; the first layout whose files all exist is read. A split without
            layouts is read only from TFDS.
        tfds: name and version of the TFDS dataset, as in 'super_glue/cb:1.0.2', or None if TFDS does not have it.
        terms: licence or terms of use, and homepage.
    """

    name: str
    features: Mapping[str, str]
    splits: Mapping[str, Sequence[FileLayout]]
    tfds: str | None = None
    terms: str = ''
    downloads: tuple[PublishedFile, ...] = ()


def build_text_features(*names: str, **others: str) -> dict[str, str]:
    """Returns a dict of features, in which each of `names` maps to TEXT, and `others` are included as they are."""
    return {**dict.fromkeys(names, TEXT), **others}


def build_single_file_layouts(files: Mapping[str, str], read: Reader) -> dict[str, list[FileLayout]]:
    """Returns the file layouts of a dataset with a single file per split."""
    return {split: [FileLayout((path,), read)] for split, path in files.items()}


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A text-to-text task.

    Attributes:
        to_text: maps examples of `dataset` to inputs and targets.
        postprocess: maps predicted and target texts to the values that `metrics` compare (see `prompts`); None compares
            the texts.
        splits: splits of the dataset to use; None uses all splits.
    """

    name: str
    dataset: LabelledDataset
    to_text: Preprocessor
    postprocess: Callable[..., Any] | None = None
    metrics: Sequence[Metric] = ()
    splits: tuple[str, ...] | None = None

    def create_source(self, data_dir: str | None = None) -> Any:
        """Returns the `sources.LabelledSource` of the examples, without opening a file."""
        # Imported lazily, because `sources` imports seqio.
        from remixer_tasks.corpora.sources import LabelledSource

        return LabelledSource(self.dataset, self.splits or tuple(self.dataset.splits), data_dir)


def build_task(
    name: str,
    source: seqio.DataSource,
    to_text: Preprocessor,
    vocabulary: seqio.Vocabulary,
    metrics: Sequence[Metric],
    postprocess: Callable[..., Any] | None,
) -> seqio.Task:
    """Returns a seqio task whose inputs and targets end with EOS, and whose source shuffles the examples.

    The task has no shuffle buffer, because seqio shuffles after `repeat`, which would mix epochs.
    """
    feature = seqio.Feature(vocabulary, add_eos=True)
    return seqio.Task(
        check_task_name(name),
        source=source,
        preprocessors=[
            to_text,
            load_vocabulary,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={'inputs': feature, 'targets': feature},
        postprocess_fn=postprocess,
        metric_fns=metrics,
        shuffle_buffer_size=None,
    )


def check_task_name(name: str) -> str:
    """Returns `name`. Raises UserError if seqio does not accept it."""
    if not re.fullmatch(r'[\w.:#]+', name):
        raise UserError(
            f'the name of a task must consist of letters, digits and _.:#, got {name!r}; correct PAIRS_NAME, DATA_NAME '
            'or EVAL_PAIRS'
        )
    return name


def list_published_folders(data_dir: str | None = None) -> list[Path]:
    """Returns the folders to search for published files, in order."""
    if data_dir:
        return [Path(data_dir).expanduser()]
    named = os.environ.get('REMIXER_T5X_DATA')
    return [*([Path(named).expanduser()] if named else []), cache.get_cache_root() / 'data']


def find_published_files(
    dataset: LabelledDataset, split: str, data_dir: str | None = None
) -> tuple[FileLayout, list[str]] | None:
    """Returns the first file layout of a split for which all files exist, and the paths of these files."""
    for folder in list_published_folders(data_dir):
        for layout in dataset.splits[split]:
            paths = [folder / path for path in layout.paths]
            if all(path.is_file() for path in paths):
                return layout, [str(path) for path in paths]
    return None


def get_tfds_root(data_dir: str | None = None) -> str:
    """Returns the folder of prepared TFDS datasets: `data_dir`, or else TFDS_DATA_DIR or TFDS's default."""
    return os.path.expanduser(data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets')


def find_tfds_folder(dataset: LabelledDataset, data_dir: str | None = None) -> str | None:
    """Returns the folder of the prepared TFDS dataset, in the version of `dataset.tfds` or else the newest version."""
    if dataset.tfds is None:
        return None
    name, _, version = dataset.tfds.partition(':')
    folder = os.path.join(get_tfds_root(data_dir), name)
    try:
        entries = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    except tf.errors.OpError:
        return None
    versions = [entry for entry in (path.rstrip('/') for path in entries) if re.fullmatch(r'\d+\.\d+\.\d+', entry)]
    if not versions:
        return None
    newest = max(versions, key=lambda entry: tuple(map(int, entry.split('.'))))
    return os.path.join(folder, version if version in versions else newest)


def describe_missing_files(dataset: LabelledDataset, split: str, data_dir: str | None) -> str:
    locations = []
    if layouts := dataset.splits[split]:
        files = ' or '.join(' + '.join(layout.paths) for layout in layouts)
        locations.append(f'{files} in {" and ".join(map(str, list_published_folders(data_dir)))}')
    if dataset.tfds:
        locations.append(f'TFDS dataset {dataset.tfds} in {data_dir or "TFDS_DATA_DIR"}')
    get = f', or run remixer-t5x data get {dataset.name}' if dataset.downloads else ''
    looked_for = f'{dataset.name} has no {split} files here (looked for {", and ".join(locations)})'
    return f'{looked_for}; set DATA_DIR to their folder{get}'
