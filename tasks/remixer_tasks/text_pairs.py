"""Pairs of input and target texts of one's own as a seqio task: any data whose rows give two texts.

A pair is one document of a corpus (`text_corpus.ParsedCorpus`), so it is parsed once, held out by hash, and read with
an exact position, as text for pretraining is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio, tf
from remixer_tasks.benchmarks import pair_metrics
from remixer_tasks.benchmarks.text_task import load_vocabulary
from remixer_tasks.corpora.text_corpus import Corpus

# Stands between the two texts of a document; no text has it, as `encode_pair` checks.
SEPARATOR = '\x1f'


def encode_pair(inputs: str, targets: str, longest: int | None = None, columns: Sequence[str] = ()) -> str:
    """The document of a pair, and of values of further columns, whose separators become spaces. Raises ValueError for a
    text that is empty, holds the separator, or has more than `longest` characters.
    """
    for name, text in (('inputs', inputs), ('targets', targets)):
        if longest is not None and len(text) > longest:
            raise ValueError(f'the {name} have more than {longest:,} characters')
        if not text.strip():
            raise ValueError(f'the {name} are empty')
        if SEPARATOR in text:
            raise ValueError(f'the {name} hold the character U+001F')
    return SEPARATOR.join([inputs, targets, *(value.replace(SEPARATOR, ' ') for value in columns)])


def column_names(columns: Sequence[str], metrics_by: str | None) -> tuple[str, ...]:
    """The columns that travel with a pair, in their order. Raises UserError for a name that the pair has already."""
    names = tuple(dict.fromkeys([*columns, *([metrics_by] if metrics_by else [])]))
    taken = [name for name in names if name.removesuffix('_pretokenized') in ('inputs', 'targets')]
    if isinstance(columns, str) or taken:
        raise UserError(
            f'COLUMNS is {columns!r} and METRICS_BY {metrics_by!r}; they take names of columns other than inputs and '
            "targets, as in COLUMNS = ['type']"
        )
    return names


@dataclasses.dataclass(frozen=True)
class PairTexts:
    """The texts of a corpus of pairs, for `vocabularies.trained`: inputs and targets, each a document."""

    corpus: Corpus

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def identity(self) -> str:
        return f'texts of {self.corpus.identity}'

    def source(self, order: int = 0) -> seqio.DataSource:
        return self.corpus.source(order)

    def training_documents(self) -> Iterator[str]:
        for document in self.corpus.training_documents():
            yield from document.split(SEPARATOR)[:2]


def task(
    corpus: Corpus,
    vocabulary: seqio.Vocabulary,
    name: str = 'text_pairs',
    metrics: Sequence[str] | str = ('accuracy',),
    columns: Sequence[str] = (),
    metrics_by: str | None = None,
) -> seqio.Task:
    """Splits train and validation, features inputs and targets with EOS.

    metrics: names of `pair_metrics.NAMED`. columns: further columns of the rows, as `local_pairs.corpus` has them,
    which predictions show. metrics_by: one whose values each metric is also computed for.
    Opens and trains nothing before its first dataset. Raises UserError for unknown metrics.
    """
    found, names = pair_metrics.named(metrics), column_names(columns, metrics_by)
    feature = seqio.Feature(vocabulary, add_eos=True)
    return seqio.Task(
        name,
        source=corpus.source(),
        preprocessors=[
            functools.partial(decode_pair, columns=names),
            load_vocabulary,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={'inputs': feature, 'targets': feature},
        postprocess_fn=pair_metrics.keep_group(metrics_by) if metrics_by else None,
        metric_fns=[pair_metrics.by_group(metric) for metric in found] if metrics_by else found,
        # A buffer here would mix epochs; the source shuffles.
        shuffle_buffer_size=None,
    )


def decode_pair(dataset: tf.data.Dataset, columns: Sequence[str] = ()) -> tf.data.Dataset:
    def split(example):
        parts = tf.strings.split(example['text'], SEPARATOR)
        further = {name: parts[index] for index, name in enumerate(columns, 2)}
        return {'inputs': parts[0], 'targets': parts[1], **further}

    return dataset.map(split)
