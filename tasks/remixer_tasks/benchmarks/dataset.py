"""A labelled data set: the features of its examples, and the files to read them from, TFDS's or the published ones.

Both yield the same examples: flat dicts with exactly `features`, and nested names joined by '/', as in 'idx/question'.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

TEXT, TEXTS, INTEGER, REAL = 'text', 'texts', 'integer', 'real'
UNLABELLED = -1
TRAIN, VALIDATION, TEST = 'train', 'validation', 'test'

Example = dict[str, Any]
# Called with one path for each of the layout's files.
Reader = Callable[..., Iterator[Example]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """One set of files in which a split is published: `paths` below the data folder, and their reader."""

    paths: tuple[str, ...]
    read: Reader


@dataclasses.dataclass(frozen=True)
class Download:
    """A public file with its SHA-256, and its folder below the data folder, where it is extracted if `unzip`."""

    url: str
    sha256: str
    folder: str
    unzip: bool = False


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A labelled data set.

    Attributes:
        name: in this package.
        features: name to TEXT, TEXTS (any number), INTEGER or REAL.
        splits: the layouts of each split, of which the first whose files exist is read; a split without layouts is read
            from TFDS only.
        tfds: TFDS's name and version, as in 'super_glue/cb:1.0.2', or None.
        terms: licence or terms, and homepage.
        downloads: the published files.
    """

    name: str
    features: Mapping[str, str]
    splits: Mapping[str, Sequence[Layout]]
    tfds: str | None = None
    terms: str = ''
    downloads: tuple[Download, ...] = ()


def texts(*names: str, **others: str) -> dict[str, str]:
    """Features: text for each of `names`, and the kinds of `others`."""
    return {**dict.fromkeys(names, TEXT), **others}


def one_layout(files: Mapping[str, str], read: Reader) -> dict[str, list[Layout]]:
    """Splits that are each published as a single file, `files` by split."""
    return {split: [Layout((path,), read)] for split, path in files.items()}
