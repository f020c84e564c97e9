"""Locates the files of a labelled data set, either prepared by TFDS or as published.

If `data_dir` is set, only that folder is searched, first for a prepared TFDS data set and then for published files.
Otherwise the search order is TFDS_DATA_DIR (or ~/tensorflow_datasets), REMIXER_T5X_DATA, and `data` in the cache.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from remixer_t5x.lazy import tf
from remixer_tasks.benchmarks.text_task import Dataset, Layout
from remixer_tasks.files import cache


def published_folders(data_dir: str | None = None) -> list[Path]:
    """Returns the folders to search for published files, in order."""
    if data_dir:
        return [Path(data_dir).expanduser()]
    named = os.environ.get('REMIXER_T5X_DATA')
    return [*([Path(named).expanduser()] if named else []), cache.cache_root() / 'data']


def find_published_files(dataset: Dataset, split: str, data_dir: str | None = None) -> tuple[Layout, list[str]] | None:
    """Returns the first file layout of a split for which all files exist, and the paths of these files."""
    for folder in published_folders(data_dir):
        for layout in dataset.splits[split]:
            paths = [folder / path for path in layout.paths]
            if all(path.is_file() for path in paths):
                return layout, [str(path) for path in paths]
    return None


def find_tfds_folder(dataset: Dataset, data_dir: str | None = None) -> str | None:
    """Returns the folder of the prepared TFDS data set, in the version of `dataset.tfds` or else the newest version."""
    if dataset.tfds is None:
        return None
    root = data_dir or os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
    name, _, version = dataset.tfds.partition(':')
    folder = os.path.join(os.path.expanduser(root), name)
    try:
        entries = tf.io.gfile.listdir(folder) if tf.io.gfile.isdir(folder) else []
    except tf.errors.OpError:
        return None
    versions = [entry for entry in (path.rstrip('/') for path in entries) if re.fullmatch(r'\d+\.\d+\.\d+', entry)]
    if not versions:
        return None
    newest = max(versions, key=lambda entry: tuple(map(int, entry.split('.'))))
    return os.path.join(folder, version if version in versions else newest)


def missing_files_message(dataset: Dataset, split: str, data_dir: str | None) -> str:
    locations = []
    if layouts := dataset.splits[split]:
        files = ' or '.join(' + '.join(layout.paths) for layout in layouts)
        locations.append(f'{files} in {" and ".join(map(str, published_folders(data_dir)))}')
    if dataset.tfds:
        locations.append(f'TFDS data set {dataset.tfds} in {data_dir or "TFDS_DATA_DIR"}')
    get = f', or run remixer-t5x data get {dataset.name}' if dataset.downloads else ''
    looked_for = f'{dataset.name} has no {split} files here (looked for {", and ".join(locations)})'
    return f'{looked_for}; set DATA_DIR to their folder{get}'
