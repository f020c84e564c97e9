"""Data sets of Hugging Face's `datasets` as corpora: text for pretraining, and pairs of texts for finetuning.

A data set is a folder that `save_to_disk` wrote, or whatever `load_dataset` takes: a name on the hub, or a folder of
Parquet, JSON or CSV files. It is read once into the cache (see `text_corpus.ParsedCorpus`), or text is streamed while
the run trains (see `streamed_text.StreamedCorpus`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import glob
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from remixer_t5x import safe_paths
from remixer_t5x.errors import UserError, reason
from remixer_tasks.benchmarks.sources import sources
from remixer_tasks.corpora import text_shards
from remixer_tasks.corpora.streamed_text import StreamedCorpus
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.corpora.volumes import TRAIN
from remixer_tasks.files import cache
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.pair_templates import Template
from remixer_tasks.text_pairs import encode_pair

Row = dict[str, Any]
# The readers of `datasets` by the endings of files; others can follow names in the data, or unpickle.
_KINDS = {
    **{'.parquet': 'parquet', '.jsonl': 'json', '.ndjson': 'json', '.json': 'json'},
    **{'.csv': 'csv', '.tsv': 'csv', '.txt': 'text'},
}


@dataclasses.dataclass(frozen=True)
class HubDataset:
    """Which data set, and which of its splits.

    Attributes:
        path: a folder, or a name on the hub.
        name: of one of its configurations on the hub, or a folder in the folder; None if there is only one.
        revision: of the hub's repository; None is its newest, which may change.
        train_split: what to train on.
        validation_split: what is held out; None holds out `validation_fraction` of the rows by their hash.
    """

    path: str
    name: str | None = None
    revision: str | None = None
    train_split: str = 'train'
    validation_split: str | None = None
    validation_fraction: float = 0.01
    strict: bool = False

    def corpus(self, kind: tuple[str, ...], document: Callable[[Row], str]) -> ParsedCorpus:
        """A corpus of what `document` makes of each row; `kind` says what that is. Rows of which it makes none
        (ValueError) are malformed."""

        def read(split: str) -> Callable[[Malformed], Iterator[str]]:
            return functools.partial(self._documents, split, document)

        return ParsedCorpus(
            name=f'{self.path}, split {self.train_split}',
            identity=cache.key('hugging face', self._state(), *kind),
            read=read(self.train_split),
            read_validation=read(self.validation_split) if self.validation_split else None,
            validation_fraction=self.validation_fraction,
            strict=self.strict,
        )

    def streamed(self, kind: tuple[str, ...], document: Callable[[Row], str]) -> StreamedCorpus:
        """The same documents as `corpus` has, read while a run trains."""

        def open_split(split: str) -> _Shards:
            chosen = self.train_split if split == TRAIN else self.validation_split
            assert chosen is not None
            return self._open(chosen, document)

        return StreamedCorpus(
            name=f'{self.path}, split {self.train_split}',
            identity=cache.key('streamed hugging face', self._state(), *kind),
            open_split=open_split,
            validation_fraction=None if self.validation_split else self.validation_fraction,
        )

    def _state(self) -> list[Any]:
        """What changes when the data does."""
        folder = Path(self.path).expanduser()
        files = sorted(path for path in folder.rglob('*') if path.is_file()) if folder.is_dir() else []
        chosen = [self.path, self.name, self.revision, self.train_split, self.validation_split]
        return [*chosen, *(sources.state(str(path)) for path in files)]

    def _documents(self, split: str, document: Callable[[Row], str], malformed: Malformed) -> Iterator[str]:
        rows, _ = self._load(split)
        texts = _Texts(f'{self.path}, split {split}', rows.features, document, malformed)
        for number, row in enumerate(rows, start=1):
            text = texts.of(row, number)
            if text is not None:
                yield text

    def _open(self, split: str, document: Callable[[Row], str]) -> _Shards:
        rows, files = self._load(split, streaming=True)
        texts = _Texts(f'{self.path}, split {split}', rows.features, document, _Reported(self.strict))
        shards = _Shards(rows, files, texts)
        # Reads a row, so that a wrong TEXT_FIELD is an error now and not when a pipeline runs.
        next(shards.read(0, None), None)
        return shards

    def _load(self, split: str, streaming: bool = False) -> tuple[Any, Sequence[str]]:
        """The rows of a split, and with `streaming` the paths or addresses of its files."""
        try:
            import datasets
        except ImportError as error:
            raise UserError(
                f"{self.path} is read with Hugging Face's datasets, which cannot be imported ({reason(error)}): "
                "pip install 'remixer-t5x[hf-datasets]'"
            ) from error
        folder = Path(self.path).expanduser()
        try:
            if folder.is_dir():
                found, files = _in_folder(folder, self.name, streaming)
            else:
                builder = datasets.load_dataset_builder(self.path, self.name, revision=self.revision)
                addresses = [address for part in (builder.config.data_files or {}).values() for address in part]
                if outside := [address for address in addresses if not address.startswith('hf://')]:
                    raise UserError(f'{self.path} names {outside[0]}, which is not on the Hub; give another data set')
                found, files = _built(builder, streaming)
        except UserError:
            raise
        except Exception as error:
            # It raises errors of many libraries: connections, file formats, names that do not exist.
            advice = '; give a folder or a name' if isinstance(error, FileNotFoundError) else ''
            raise UserError(f'HF_DATASET {self.path} cannot be read ({reason(error)}){advice}') from error
        if split not in found:
            raise UserError(f'{self.path} has no split {split!r}; its splits are {", ".join(found)}')
        return found[split], files.get(split, ())


def _in_folder(folder: Path, name: str | None, streaming: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The splits of a folder, and their files. Reads only data files in the folder.

    The folder may be a stranger's: its README.md and state.json, which can name any file or address, are not read, and
    a link that leaves the folder is refused.
    """
    import datasets

    place = folder / (name or '')
    if not place.is_dir():
        raise UserError(f'HF_NAME is {name!r}; allowed are the names of folders in {folder}')
    safe_paths.check_inside(folder)
    saved = {part.name: part for part in sorted(place.iterdir()) if (part / 'state.json').exists()}
    if (place / 'state.json').exists():
        saved = {'train': place}
    if saved:
        files = {split: [str(file) for file in _saved_files(part)] for split, part in saved.items()}
        found = {
            split: datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in paths])
            for split, paths in files.items()
        }
        return ({split: _in_shards(rows) for split, rows in found.items()} if streaming else found), files
    patterns = datasets.data_files.get_data_patterns(str(place))
    listed = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=str(place))
    kinds = collections.Counter(kind for paths in listed.values() for file in paths if (kind := _kind(file)))
    if not kinds:
        raise UserError(f'{place} has no data; allowed are {", ".join(_KINDS)} files, also gzipped, or save_to_disk')
    ((kind, _),) = kinds.most_common(1)
    chosen = {split: [glob.escape(file) for file in paths if _kind(file) == kind] for split, paths in listed.items()}
    chosen = {split: paths for split, paths in chosen.items() if paths}
    options = {'sep': '\t'} if kind == '.tsv' else {}
    return _built(datasets.load_dataset_builder(_KINDS[kind], data_files=chosen, **options), streaming)


def _saved_files(folder: Path) -> list[Path]:
    """What `save_to_disk` wrote, without the files that `datasets` caches next to it."""
    return sorted([*folder.glob('data-*.arrow'), *folder.glob('dataset.arrow')])


def _kind(file: str) -> str | None:
    return next((suffix for suffix in Path(file).suffixes if suffix in _KINDS), None)


def _built(builder: Any, streaming: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    files = builder.config.data_files or {}
    if streaming:
        return builder.as_streaming_dataset(), files
    builder.download_and_prepare()
    return builder.as_dataset(), files


def _in_shards(rows: Any) -> Any:
    """A saved data set as a stream. It may be one file, and is cut into as many shards as parsed text is."""
    return rows.to_iterable_dataset(num_shards=max(1, min(text_shards.SHARDS, len(rows))))


class _Texts:
    """What `document` makes of rows; `where` names the rows in messages, and `features` has their class labels."""

    def __init__(
        self, where: str, features: Mapping[str, Any] | None, document: Callable[[Row], str], malformed: Malformed
    ):
        self.where, self._document, self._malformed = where, document, malformed
        self._labels = {name: kind for name, kind in (features or {}).items() if hasattr(kind, 'int2str')}

    def of(self, row: Row, number: int, part: str = '') -> str | None:
        """The text of row `number`, from 1, of a part of the data; None for a row that is malformed or empty."""
        for name, feature in self._labels.items():
            row[name] = feature.int2str(row[name]) if row[name] is not None and row[name] >= 0 else None
        try:
            text = self._document(row)
        except UserError:
            raise
        except ValueError as error:
            self._malformed.record(self.where + part, number, str(error))
            return None
        if not text.strip():
            self._malformed.empty(self.where + part, number)
            return None
        return text


class _Reported(Malformed):
    """Reports the first malformed row at once, because a stream has no end at which to sum up."""

    def record(self, path: str, line: int, reason: str) -> None:
        super().record(path, line, reason)
        if self.count == 1:
            print(
                f'warning: skipping {path}:{line} ({reason}), and further malformed rows without a message; '
                'STRICT = True refuses them',
                file=sys.stderr,
            )


@dataclasses.dataclass(frozen=True)
class _Shards:
    """The shards of an `IterableDataset`, whose own `state_dict` is the state of a shard; see `streamed_text.Shards`.

    `shuffle` of `datasets` is not used: what its buffer held would be lost at a resume.
    """

    rows: Any
    files: Sequence[str]
    texts: _Texts

    @property
    def count(self) -> int:
        return self.rows.num_shards

    def read(self, shard: int, state: Any) -> Iterator[tuple[str, Any]]:
        before, position = state or (0, None)
        number = before
        try:
            rows = self.rows.shard(num_shards=self.count, index=shard)
            if position:
                rows.load_state_dict(position)
            for number, row in enumerate(rows, start=before + 1):
                text = self.texts.of(row, number, f', shard {shard}')
                if text is not None:
                    yield text, (number, rows.state_dict())
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f'{self.texts.where}, shard {shard} cannot be read after row {number} ({reason(error)})'
            ) from error


def corpus(dataset: HubDataset, field: str = 'text', streaming: bool = False) -> ParsedCorpus | StreamedCorpus:
    """The texts of the column `field`, for pretraining; `streaming` reads them while the run trains, without a copy.

    Raises UserError, at first use, where the column is missing.
    """
    if not isinstance(streaming, bool):
        raise UserError(f'HF_STREAMING is {streaming!r}; it takes True or False')

    def text_of(row: Row) -> str:
        if field not in row:
            raise UserError(f'TEXT_FIELD is {field!r}; the columns of {dataset.path} are {", ".join(row)}')
        if not isinstance(row[field], str):
            raise ValueError(f'column {field} holds no text')
        return row[field]

    return (dataset.streamed if streaming else dataset.corpus)(('text', field), text_of)


def pairs(dataset: HubDataset, inputs: str, targets: str) -> ParsedCorpus:
    """Pairs for `text_pairs.task`: two columns, or templates with columns in braces, as in 'premise: {premise}'.

    A column of class labels stands for the label's name. Rows that lack a value of a column are malformed.
    """

    templates = Template(inputs, 'INPUTS'), Template(targets, 'TARGETS')

    def pair(row: Row) -> str:
        for template in templates:
            if not set(template.columns) <= row.keys():
                raise template.no_column(row)
        return encode_pair(templates[0].fill(row), templates[1].fill(row))

    return dataset.corpus(('pairs', inputs, targets), pair)
