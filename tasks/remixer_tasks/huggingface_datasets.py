"""Reads datasets with Hugging Face's `datasets`: text for pretraining, and pairs of texts for finetuning.

A dataset is a folder written by `save_to_disk`, a name on the Hub, or a folder of Parquet, JSON or txt files.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remixer_t5x import ranges, untrusted_files
from remixer_t5x.errors import UserError, import_optional, root_cause_message
from remixer_tasks.corpora.streamed_text import StreamedCorpus
from remixer_tasks.corpora.text_corpus import TRAIN, ParsedCorpus
from remixer_tasks.files import cache
from remixer_tasks.files.row_files import COMPRESSIONS, Row, add_nested_columns, check_columns_exist
from remixer_tasks.files.text_lines import BadRecords
from remixer_tasks.text_pairs import TextTemplate, encode_row_as_pair

# Maximum number of shards of a streamed dataset from `save_to_disk`; enough for the hosts of a large pod.
_MAX_SHARDS = 64
# Maps file extensions to readers of `datasets`. Its CSV reader would change cells, such as 007 to 7. Other readers are
# unsafe: they open files to which the data refers, or unpickle objects.
_READERS = {'.parquet': 'parquet', '.jsonl': 'json', '.ndjson': 'json', '.json': 'json', '.txt': 'text'}


@dataclasses.dataclass(frozen=True)
class HubDataset:
    """A Hugging Face dataset and the splits to use.

    Attributes:
        path: a folder, or a name on the Hub.
        name: name of the configuration on the Hub or of the subfolder; None if there is only one.
        revision: revision of the repository on the Hub; None uses the newest revision.
        train_split: the training split.
        validation_split: the held-out split; None holds out `validation_fraction` of the training rows by their hash.
    """

    path: str
    name: str | None = None
    revision: str | None = None
    train_split: str = 'train'
    validation_split: str | None = None
    validation_fraction: ranges.OpenFraction = 0.01
    strict: bool = False

    def build_corpus(self, kind: tuple[str, ...], document: Callable[[Row], str]) -> ParsedCorpus:
        """Returns a corpus with a document for each row; `kind` identifies the function `document` in cache keys.

        If `document` raises ValueError, the row is malformed.
        """
        read = functools.partial(self._read_documents, document)
        return ParsedCorpus(
            name=f'{self.path}, split {self.train_split}',
            identity=cache.hash_cache_key('hugging face 2', self._compute_fingerprint(), *kind),
            read=functools.partial(read, self.train_split),
            read_validation=functools.partial(read, self.validation_split) if self.validation_split else None,
            validation_fraction=self.validation_fraction,
            strict=self.strict,
        )

    def build_streamed_corpus(self, kind: tuple[str, ...], document: Callable[[Row], str]) -> StreamedCorpus:
        """Returns a corpus that reads the documents during training; the arguments are those of `build_corpus`."""
        return StreamedCorpus(
            name=f'{self.path}, split {self.train_split}',
            identity=cache.hash_cache_key('streamed hugging face', self._compute_fingerprint(), *kind),
            open_split=functools.partial(self._open_shards, document),
            validation_fraction=None if self.validation_split else self.validation_fraction,
        )

    def _compute_fingerprint(self) -> list[Any]:
        """Returns the settings and file states that identify the data."""
        files = sorted(path for path in Path(self.path).expanduser().rglob('*') if path.is_file())
        settings = [self.path, self.name, self.revision, self.train_split, self.validation_split]
        return [*settings, *(cache.read_file_state(str(path)) for path in files)]

    def _read_documents(self, document: Callable[[Row], str], split: str, malformed: BadRecords) -> Iterator[str]:
        rows, _ = self._load_split(split)
        parser = _RowParser(f'{self.path}, split {split}', rows.features, document, malformed)
        texts = (parser.parse_row(row, number) for number, row in enumerate(rows, start=1))
        return (text for text in texts if text is not None)

    def _open_shards(self, document: Callable[[Row], str], split: str) -> DatasetShards:
        name = self.train_split if split == TRAIN else str(self.validation_split)
        rows, files = self._load_split(name, streaming=True)
        parser = _RowParser(f'{self.path}, split {name}', rows.features, document, _BadRecordsWithWarning(self.strict))
        shards = DatasetShards(rows, files, parser)
        # Reads one row, so that a wrong TEXT_FIELD is reported before a pipeline runs.
        next(shards.read_documents(0, None), None)
        return shards

    def _load_split(self, split: str, streaming: bool = False) -> tuple[Any, Sequence[str]]:
        """Returns the rows of a split, and the paths or URLs of its files if they are known."""
        datasets = import_optional('datasets', self.path, 'hf-datasets')
        folder = Path(self.path).expanduser()
        try:
            if folder.is_dir():
                splits, files = _load_folder(folder, self.name, streaming)
            else:
                builder = datasets.load_dataset_builder(self.path, self.name, revision=self.revision)
                urls = [url for part in (builder.config.data_files or {}).values() for url in part]
                if outside := [url for url in urls if not url.startswith('hf://')]:
                    raise UserError(f'{self.path} refers to {outside[0]}, which is not on the Hub; use another dataset')
                splits, files = _load_splits(builder, streaming)
        except UserError:
            raise
        except Exception as error:
            # `datasets` raises errors from many libraries, such as connection and file format errors.
            advice = '; use an existing folder or Hub name' if isinstance(error, FileNotFoundError) else ''
            # Its JSON reader raises StopIteration if all files are empty.
            reason = 'its files are empty' if isinstance(error, StopIteration) else root_cause_message(error)
            raise UserError(f'HF_DATASET {self.path} cannot be read ({reason}){advice}') from error
        if split not in splits:
            raise UserError(f'the split of {self.path} must be one of {", ".join(splits)}, got {split!r}')
        return splits[split], files.get(split, ())


def _load_folder(folder: Path, name: str | None, streaming: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns the splits of a local folder, and their files.

    README.md and the folders in state.json are ignored, because they can refer to any file or URL. Links that point
    outside the folder raise UserError.
    """
    import datasets

    data_folder = folder / (name or '')
    if not data_folder.is_dir():
        raise UserError(f'HF_NAME must be the name of a folder in {folder}, got {name!r}')
    untrusted_files.check_links_inside(folder)
    saved = {part.name: part for part in sorted(data_folder.iterdir()) if (part / 'state.json').exists()}
    if (data_folder / 'state.json').exists():
        saved = {'train': data_folder}
    if saved:
        # Reads only the files in state.json: others may be caches, or shards of an earlier `save_to_disk`.
        states = {split: untrusted_files.read_json_object(part / 'state.json') for split, part in saved.items()}
        files = {
            split: [str(saved[split] / Path(file['filename']).name) for file in state['_data_files']]
            for split, state in states.items()
        }
        splits = {
            split: datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in paths])
            for split, paths in files.items()
        }
        if streaming:
            splits = {
                split: rows.to_iterable_dataset(num_shards=max(1, min(_MAX_SHARDS, len(rows))))
                for split, rows in splits.items()
            }
        return splits, files
    patterns = datasets.data_files.get_data_patterns(str(data_folder))
    listed = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=str(data_folder))
    files_by_extension: dict[str, dict[str, list[str]]] = {}
    for split, paths in listed.items():
        for file in paths:
            if extension := _find_data_file_extension(file):
                files_by_extension.setdefault(extension, {}).setdefault(split, []).append(file)
    if not files_by_extension:
        raise UserError(
            f'{data_folder} must contain files with the extension {", ".join(_READERS)} (may be gzipped), or be '
            'written by save_to_disk, got neither; read CSV and TSV with data/own_text.gin or data/own_pairs.gin'
        )
    # Reads the files with the most frequent extension.
    extension, chosen = max(files_by_extension.items(), key=lambda item: sum(map(len, item[1].values())))
    escaped = {split: [glob.escape(file) for file in paths] for split, paths in chosen.items()}
    return _load_splits(datasets.load_dataset_builder(_READERS[extension], data_files=escaped), streaming)


def _find_data_file_extension(file: str) -> str | None:
    path = Path(file)
    extension = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return extension if extension in _READERS else None


def _load_splits(builder: Any, streaming: bool) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    files = builder.config.data_files or {}
    if streaming:
        return builder.as_streaming_dataset(), files
    builder.download_and_prepare()
    return builder.as_dataset(), files


def _convert_value(feature: Any, value: Any) -> Any:
    """Replaces class labels by their names, and float32 numbers by those with the shortest text: 0.1."""
    if value is None:
        return None
    if isinstance(feature, Mapping):
        return {name: _convert_value(feature[name], item) for name, item in value.items()}
    if hasattr(feature, 'feature') and isinstance(value, list):
        return [_convert_value(feature.feature, item) for item in value]
    if hasattr(feature, 'int2str'):
        return feature.int2str(value) if value >= 0 else None
    return float(str(np.float32(value))) if getattr(feature, 'dtype', None) == 'float32' else value


@dataclasses.dataclass(frozen=True)
class _RowParser:
    """Converts rows to texts with `document`, after `_convert_value`; error messages contain `where`."""

    where: str
    features: Mapping[str, Any] | None
    document: Callable[[Row], str]
    malformed: BadRecords

    def parse_row(self, row: Row, number: int, part: str = '') -> str | None:
        """Converts a row to a text; returns None for a malformed or empty row. Messages contain `number` and `part`."""
        row = _convert_value(self.features, row)
        try:
            text = self.document(add_nested_columns(row))
        except UserError:
            raise
        except ValueError as error:
            self.malformed.add_malformed_record(self.where + part, number, str(error))
            return None
        if not text.strip():
            self.malformed.add_empty_record(self.where + part, number)
            return None
        return text


class _BadRecordsWithWarning(BadRecords):
    """Warns about the first malformed row immediately, because a stream never prints a summary."""

    def add_malformed_record(self, path: str, line: int, reason: str) -> None:
        super().add_malformed_record(path, line, reason)
        if self.count == 1:
            print(
                f'warning: skipping {path}:{line} ({reason}), and further malformed rows without a warning; '
                'set STRICT = True to raise an error instead',
                file=sys.stderr,
            )


@dataclasses.dataclass(frozen=True)
class DatasetShards:
    """Shards of an `IterableDataset`; states contain its `state_dict`."""

    rows: Any
    files: Sequence[str]
    parser: _RowParser

    @property
    def num_shards(self) -> int:
        return self.rows.num_shards

    def read_documents(self, shard: int, state: Any) -> Iterator[tuple[str, Any]]:
        before, position = state or (0, None)
        number = before
        try:
            rows = self.rows.shard(num_shards=self.num_shards, index=shard)
            if position:
                rows.load_state_dict(position)
            for number, row in enumerate(rows, start=before + 1):
                text = self.parser.parse_row(row, number, f', shard {shard}')
                if text is not None:
                    yield text, (number, rows.state_dict())
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f'{self.parser.where}, shard {shard} cannot be read after row {number} ({root_cause_message(error)})'
            ) from error


def corpus(dataset: HubDataset, field: str = 'text', streaming: bool = False) -> ParsedCorpus | StreamedCorpus:
    """Returns a pretraining corpus with the texts of the column `field`.

    If `streaming` is True, the texts are read during training, without a local copy.
    """

    def get_text(row: Row) -> str:
        check_columns_exist({'TEXT_FIELD': [field]}, row, dataset.path)
        if not isinstance(row.get(field), str):
            raise ValueError(f'column {field} must contain text, got {type(row.get(field)).__name__}')
        return row[field]

    return (dataset.build_streamed_corpus if streaming else dataset.build_corpus)(('text', field), get_text)


def pairs(dataset: HubDataset, inputs: str, targets: str) -> ParsedCorpus:
    """Returns a corpus of pairs for `text_pairs.task` from two columns or templates, as in 'premise: {premise}'.

    Class labels are replaced by their names, and lists of class labels by names separated by spaces. A row without a
    value for a column is malformed.
    """
    templates = TextTemplate(inputs, 'INPUTS'), TextTemplate(targets, 'TARGETS')
    return dataset.build_corpus(('pairs 3', inputs, targets), functools.partial(encode_row_as_pair, templates))
