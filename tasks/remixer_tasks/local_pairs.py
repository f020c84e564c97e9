"""A user's own labelled rows as pairs of texts, described in gin or flags alone (PAIRS, INPUTS, TARGETS, ...)."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio
from remixer_tasks.corpora.text_corpus import ParsedCorpus, Words
from remixer_tasks.files import bounded_lines, cache, row_files
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.local_files import Files, expand, expand_held_out, state
from remixer_tasks.pair_templates import NoColumn, Template
from remixer_tasks.text_pairs import PairTexts, column_names, encode_pair

ROWS = Words(
    'row',
    'give VALIDATION_PAIRS, or more rows',
    'give files with rows, and check PAIRS_FORMAT, DELIMITER and ENCODING',
)
_EXAMPLE = '*.jsonl'


def corpus(
    files: Files | None,
    inputs: str = 'inputs',
    targets: str = 'targets',
    validation_files: Files | None = None,
    format: str | None = None,
    delimiter: str | None = None,
    encoding: str = 'utf-8',
    validation_fraction: float = 0.01,
    strict: bool = False,
    longest: ranges.Count = bounded_lines.LONGEST,
    columns: Sequence[str] = (),
    metrics_by: str | None = None,
) -> ParsedCorpus:
    """Pairs for `text_pairs.task`, of the rows of `files`: a path or glob, or a list of them; None, to
    evaluate on `validation_files` only.

    inputs, targets: a column (a field, of JSON lines), or a template with columns in braces, as in
        'premise: {premise} hypothesis: {hypothesis}'. Of TSV and CSV without a line of column names, give numbers:
        '{0}' is the first column.
    validation_files: held-out rows; None holds out `validation_fraction` of the rows by their hash.
    format, delimiter, encoding, longest: see `row_files.RowLayout`; a text has at most `longest` characters too.
    strict: a row that cannot be read or lacks a value is refused; otherwise it is skipped and counted. JSON's null and
        NaN, and Parquet's, are not values; the cells of TSV and CSV are texts, also `null`.
    columns, metrics_by: further columns to keep with each pair, as for `text_pairs.task`; a row without one has ''.
    Raises UserError for a glob without files, a missing file and an unknown format; the files are read at first use.
    """
    templates = Template(inputs, 'INPUTS'), Template(targets, 'TARGETS')
    numbered = all(name.isdecimal() for template in templates for name in template.columns)
    layout = row_files.RowLayout(format, longest, delimiter, encoding, numbered)
    if files is None and validation_files:
        train = expand(validation_files, 'VALIDATION_PAIRS', layout.format_of, _EXAMPLE)
        held_out: list[str] | None = train
    else:
        train = expand(files or (), 'PAIRS', layout.format_of, _EXAMPLE)
        held_out = expand_held_out(validation_files, train, 'PAIRS', 'VALIDATION_PAIRS', layout.format_of, _EXAMPLE)
    kept = column_names(columns, metrics_by)
    read = functools.partial(_pairs, layout=layout, templates=templates, columns=kept)
    parts = [[state(path) for path in group] for group in (train, held_out or [])]
    return ParsedCorpus(
        name=f'{train[0]}' if len(train) == 1 else f'{len(train)} files ({train[0]}, ...)',
        identity=cache.key(
            'local pairs 2', parts, format, inputs, targets, longest, delimiter, encoding, *([kept] if kept else [])
        ),
        read=functools.partial(read, train),
        read_validation=functools.partial(read, held_out) if held_out else None,
        validation_fraction=validation_fraction,
        strict=strict,
        words=ROWS,
    )


def _pairs(
    paths: Sequence[str],
    malformed: Malformed,
    layout: row_files.RowLayout,
    templates: tuple[Template, Template],
    columns: Sequence[str] = (),
) -> Iterator[str]:
    for path in paths:
        # The names of the first row, for columns that no row has had so far.
        names: list[str] = []
        seen: set[str] = set()
        for number, row in row_files.read(path, layout, malformed):
            names = names or list(row)
            seen.update(row)
            try:
                further = ['' if row.get(name) is None else str(row[name]) for name in columns]
                pair = encode_pair(templates[0].fill(row), templates[1].fill(row), layout.longest, further)
            except ValueError as error:
                if isinstance(error, NoColumn) and layout.format_of(path) != 'jsonl':
                    # All rows have the same columns.
                    break
                malformed.record(path, number, str(error))
                continue
            yield pair
        for template in templates:
            if names and not set(template.columns) <= seen:
                raise template.no_column(names)
        absent = [name for name in columns if names and name not in seen]
        if absent:
            raise UserError(f'COLUMNS or METRICS_BY names {absent[0]!r}, and {path} has the columns {", ".join(names)}')


def texts(pairs: ParsedCorpus) -> PairTexts:
    """The pairs' own inputs and targets, to train a vocabulary on."""
    return PairTexts(pairs)


def evaluated(
    task: seqio.Task,
    files: Mapping[str, Files] | None,
    read: Callable[..., ParsedCorpus],
    make: Callable[..., seqio.Task],
) -> seqio.Task | list[seqio.Task]:
    """`task`, and a task for each of several sets of files, as {'dev': 'dev.tsv', 'hard': 'hard/*.tsv'}: NAME_dev, ...

    read, make: `corpus` and `text_pairs.task` with the settings of the training task. Each further task has all rows of
    its files in the split `validation`; nothing is opened. Without files it is `task` alone.
    """
    if not files:
        return task
    if not isinstance(files, Mapping):
        raise UserError(f"EVAL_PAIRS is {files!r}; give each file a name, as in EVAL_PAIRS = {{'hard': 'hard.jsonl'}}")
    unusable = [name for name in files if not re.fullmatch(r'[\w-]+', str(name))]
    if unusable:
        raise UserError(
            f'EVAL_PAIRS names {unusable[0]!r}; names of files are in metrics and folders: use letters, digits, _ and -'
        )
    tasks = [task]
    for name, paths in files.items():
        rows = read(files=paths, validation_files=None)
        identity = cache.key('all held out', rows.identity)
        held_out = dataclasses.replace(rows, identity=identity, read_validation=rows.read)
        tasks.append(make(corpus=held_out, name=f'{task.name}_{name}'))
    return tasks
