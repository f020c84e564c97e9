"""Defines seqio tasks on pairs of input and target texts, and templates that build texts from columns.

A pair is stored as one document of a `text_corpus.ParsedCorpus`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf
from remixer_tasks.benchmarks import text_metrics, text_task
from remixer_tasks.corpora.text_corpus import Corpus, KeyedDocument
from remixer_tasks.files import row_files, text_lines

# Separates the input, target and columns in a document; `encode_pair` rejects inputs and targets that contain it.
SEPARATOR = '\x1f'
_PARTS = re.compile(r'(\{\{|\}\}|\{[^{}]*\})')


@dataclasses.dataclass(frozen=True)
class TextTemplate:
    """A template that builds a text from the columns of a row; `text` is the value of the setting `macro`.

    A template is the name of a column, or a string with column names in braces; `{{` and `}}` are literal braces.
    Python's format strings are not used, because they can access attributes (`{a.__class__}`) and create texts of
    gigabytes (`{a:>1000000000}`).
    """

    text: str
    macro: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise UserError(
                f"{self.macro} must be a column or a template such as 'answer: {{label}}', got {self.text!r}"
            )
        between = _PARTS.split(self.text)[::2]
        if re.search('[{}]', ''.join(between)) or '' in self.columns:
            raise UserError(f"{self.macro} must have columns in braces, as in 'answer: {{label}}', got {self.text!r}")

    @functools.cached_property
    def _parts(self) -> list[tuple[bool, str]]:
        """The parts of the template in order, as pairs (True, column name) and (False, literal text)."""
        if not set(self.text) & set('{}'):
            return [(True, self.text)]
        parts = []
        for number, part in enumerate(_PARTS.split(self.text)):
            is_column = number % 2 == 1 and part not in ('{{', '}}')
            # `__post_init__` rejects other braces in the literal text.
            parts.append((is_column, part[1:-1] if is_column else part.replace('{{', '{').replace('}}', '}')))
        return parts

    @functools.cached_property
    def columns(self) -> list[str]:
        return [part for is_column, part in self._parts if is_column]

    @property
    def has_numbered_columns(self) -> bool:
        """Whether all columns are numbers. If this holds for all templates, TSV and CSV files have no header line."""
        return all(name.isdecimal() for name in self.columns)

    def fill_from_row(self, row: row_files.Row) -> str:
        """Fills the template with a row.

        Raises UserError if a column is missing, and ValueError if it is empty, or neither text nor a number.
        """
        row_files.check_columns_exist({self.macro: self.columns}, row)
        return ''.join(_get_column_text(row, part) if is_column else part for is_column, part in self._parts)


def _get_column_text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f'column {name} is empty')
    if isinstance(value, Mapping) and 'answer_start' in value:
        # SQuAD's answers are kept as JSON.
        return json.dumps(value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        # Replaces spaces within words, because spaces separate words.
        return ' '.join('_'.join(item.split()) or '_' for item in value)
    if not isinstance(value, str | bytes) and isinstance(value, Iterable):
        raise ValueError(f'column {name} must be a string or a list of words')
    return format_value(value)


def format_value(value: Any) -> str:
    """Converts a value to text, and a missing value (None or NaN) to ''.

    Whole floats lose '.0', because pandas makes an integer column with a gap float.
    """
    if value is None or value != value:
        return ''
    if isinstance(value, bytes):
        return value.decode()
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def encode_pair(inputs: str, targets: str, columns: Sequence[str] = ()) -> str:
    """Joins a pair and additional column values into one document; replaces separators in these values with spaces.

    Raises ValueError if the input or target is empty, contains the separator, or has more than MAX_CHARACTERS.
    """
    for name, text in (('inputs', inputs), ('targets', targets)):
        if len(text) > text_lines.MAX_CHARACTERS:
            raise ValueError(f'the {name} have more than {text_lines.MAX_CHARACTERS:,} characters')
        if not text.strip():
            raise ValueError(f'the {name} are empty')
        if SEPARATOR in text:
            raise ValueError(f'the {name} contain the character U+001F')
    return SEPARATOR.join([inputs, targets, *(value.replace(SEPARATOR, ' ') for value in columns)])


def encode_row_as_pair(
    templates: tuple[TextTemplate, TextTemplate], row: row_files.Row, columns: Sequence[str] = ()
) -> KeyedDocument:
    """Encodes a row as a pair, whose split depends on the values in the columns, not on the templates' text."""
    pair = KeyedDocument(encode_pair(templates[0].fill_from_row(row), templates[1].fill_from_row(row), columns))
    names = sorted({name for template in templates for name in template.columns})
    # Rows that differ only in columns outside the templates give equal pairs, which must be in the same split.
    pair.split_key = json.dumps([_get_column_text(row, name) for name in names])
    return pair


def check_column_names(columns: Sequence[str], metrics_by: str | None) -> tuple[str, ...]:
    """Returns the names of additional columns, in order. Raises UserError for 'inputs' and 'targets'."""
    names = tuple(dict.fromkeys([*columns, *([metrics_by] if metrics_by else [])]))
    reserved = [name for name in names if name.removesuffix('_pretokenized') in ('inputs', 'targets')]
    if reserved:
        raise UserError(
            f'COLUMNS and METRICS_BY must name columns other than inputs and targets, got {columns!r} and '
            f"{metrics_by!r}; set COLUMNS = ['type']"
        )
    return names


@dataclasses.dataclass(frozen=True)
class PairTexts:
    """A corpus for vocabulary training, in which the inputs and targets of pairs are separate documents."""

    corpus: Corpus

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def training_data_key(self) -> str:
        return f'texts of {self.corpus.training_data_key}'

    def create_source(self, order: int = 0) -> seqio.DataSource:
        return self.corpus.create_source(order)

    def read_training_documents(self) -> Iterator[str]:
        for document in self.corpus.read_training_documents():
            yield from document.split(SEPARATOR)[:2]


def task(
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    name: str = 'text_pairs',
    metrics: Sequence[str] | str = ('accuracy',),
    columns: Sequence[str] = (),
    metrics_by: str | None = None,
) -> seqio.Task:
    """Returns a task with the splits `train` and `validation`, whose inputs and targets end with EOS.

    Args:
        metrics: names of metrics in `text_metrics.METRICS_BY_NAME`.
        columns: additional columns of the rows, which are written with the predictions.
        metrics_by: name of a column; each metric is also computed for each value of this column.
    """
    metric_fns, names = text_metrics.select_metrics(metrics), check_column_names(columns, metrics_by)
    postprocess = text_metrics.make_group_postprocessor(metrics_by) if metrics_by else None
    metric_fns = [text_metrics.build_grouped_metric(metric) for metric in metric_fns] if metrics_by else metric_fns
    to_text = functools.partial(decode_pair, columns=names)
    return text_task.build_task(name, corpus.create_source(), to_text, vocabulary, metric_fns, postprocess)


def decode_pair(dataset: tf.data.Dataset, columns: Sequence[str] = ()) -> tf.data.Dataset:
    """Splits documents written by `encode_pair` into inputs, targets and additional columns."""

    def split_document(example):
        parts = tf.strings.split(example['text'], SEPARATOR)
        further = {name: parts[index] for index, name in enumerate(columns, 2)}
        return {'inputs': parts[0], 'targets': parts[1], **further}

    return dataset.map(split_document)
