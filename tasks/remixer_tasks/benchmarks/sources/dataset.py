"""A labelled data set: the features of its examples, and the files they are read from, TFDS's or the published ones.

Both give the same examples: flat dicts with exactly `features`, nested names joined by '/', as in 'idx/question'.
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
    """One way in which a split is published: `paths` below the data folder, and what reads them."""

    paths: tuple[str, ...]
    read: Reader


@dataclasses.dataclass(frozen=True)
class Download:
    """A public file. sha256: of its bytes. folder: where it goes below the data folder, unpacked there if `unzip`."""

    url: str
    sha256: str
    folder: str
    unzip: bool = False


@dataclasses.dataclass(frozen=True)
class Dataset:
    """name: of this table. features: name to TEXT, TEXTS (any number), INTEGER or REAL.

    splits: the layouts of each split, the first that is there being read; a split without any comes from TFDS alone.
    tfds: TFDS's name and version, as in 'super_glue/cb:1.0.2', or None.
    tfds_splits: TFDS's names of the splits where they differ.
    terms: licence or terms, and homepage.
    """

    name: str
    features: Mapping[str, str]
    splits: Mapping[str, Sequence[Layout]]
    tfds: str | None = None
    tfds_splits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    terms: str = ''
    downloads: tuple[Download, ...] = ()
