"""Builds text pairs from labelled rows in local files, configured with gin macros or flags (PAIRS, INPUTS, ...)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from remixer_t5x import ranges
from remixer_t5x.lazy_imports import seqio
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.files import cache, row_files, text_lines
from remixer_tasks.files.text_lines import BadRecords
from remixer_tasks.local_files import Files, describe_files, expand_held_out_paths, expand_paths
from remixer_tasks.text_pairs import (
    TextTemplate,
    check_column_names,
    encode_row_as_pair,
    format_value,
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
    validation_fraction: ranges.OpenFraction = 0.01,
    strict: bool = False,
    columns: Sequence[str] = (),
    metrics_by: str | None = None,
) -> ParsedCorpus:
    """Returns a corpus of pairs for `text_pairs.task` from the rows of files, which are read at first use.

    Args:
        files: a path or glob, or a list of them; None if there are only `validation_files` to evaluate.
        inputs: a column (a field of JSON lines), or a template with columns in braces, as in
            'premise: {premise} hypothesis: {hypothesis}'. A column may contain a list of words. If all columns of
            `inputs` and `targets` are numbers, TSV and CSV have no header: '{0}' is the first column.
        targets: column or template of the targets, with the same syntax as `inputs`.
        validation_files: files with held-out rows; None holds out `validation_fraction` of the rows. These rows are
            selected by the hash of the columns of `inputs` and `targets`, independently of other text in the templates.
        format: one of `row_files.FORMATS`; None detects the format from the file extension.
        delimiter: delimiter of columns in TSV and CSV files; None uses a tab or a comma.
        encoding: text encoding of the files.
        strict: whether to raise UserError for a row that cannot be read or lacks a value, instead of skipping and
            counting it. Null and NaN count as missing in JSON and Parquet; in TSV and CSV, `null` is ordinary text.
        columns: additional columns to write with the predictions; missing values are written as ''.
        metrics_by: a column; each metric is also computed for each value of this column.
    """
    templates = TextTemplate(inputs, 'INPUTS'), TextTemplate(targets, 'TARGETS')
    numbered = all(template.has_numbered_columns for template in templates)
    layout = row_files.RowLayout(format, delimiter, encoding, numbered)
    if files is None and validation_files:
        train = held_out = expand_paths(validation_files, 'VALIDATION_PAIRS', _EXAMPLE)
    else:
        train = expand_paths(files, 'PAIRS', _EXAMPLE)
        held_out = expand_held_out_paths(validation_files, train, 'PAIRS', 'VALIDATION_PAIRS', _EXAMPLE)
    further = check_column_names(columns, metrics_by)
    read = functools.partial(_read_pairs, layout=layout, templates=templates, columns=further)
    states = [[cache.read_file_state(path) for path in group] for group in (train, held_out)]
    settings = (format, inputs, targets, text_lines.MAX_CHARACTERS, delimiter, encoding)
    read_train = functools.partial(read, train)
    read_held_out = read_train if held_out is train else functools.partial(read, held_out) if held_out else None
    return ParsedCorpus(
        name=describe_files(train),
        identity=cache.hash_cache_key('local pairs 5', states, *settings, *([further, 2] if further else [])),
        read=read_train,
        read_validation=read_held_out,
        validation_fraction=validation_fraction,
        strict=strict,
    )


def _read_pairs(
    paths: Sequence[str],
    malformed: BadRecords,
    layout: row_files.RowLayout,
    templates: tuple[TextTemplate, TextTemplate],
    columns: Sequence[str],
) -> Iterator[str]:
    settings = {template.macro: template.columns for template in templates} | {'COLUMNS and METRICS_BY': columns}
    for path in paths:
        for number, row in row_files.read_rows_with_columns(path, layout, malformed, settings):
            try:
                further = [format_value(row.get(name)) for name in columns]
                pair = encode_row_as_pair(templates, row, further)
            except ValueError as error:
                malformed.add_malformed_record(path, number, str(error))
                continue
            yield pair


def evaluation_tasks(
    task: seqio.Task,
    files: Mapping[str, Files] | None,
    read: Callable[..., ParsedCorpus],
    make: Callable[..., seqio.Task],
    train: Files | None = None,
) -> seqio.Task | list[seqio.Task]:
    """Returns `task` and an evaluation task for each entry of `files`, as in {'dev': 'dev.tsv', 'hard': 'hard/*.tsv'}.

    For example, the entry 'dev' adds the task NAME_dev, whose split `validation` contains all rows of its files. If
    `files` is None or empty, only `task` is returned. The functions `read` (`corpus`) and `make` (`text_pairs.task`)
    must have the settings of the training task. Raises UserError if a file is also in `train`, the training files.
    """
    if not files:
        return task
    tasks, train_paths = [task], expand_paths(train, 'PAIRS', _EXAMPLE) if train else []
    for name, paths in files.items():
        held_out_paths = expand_held_out_paths(paths, train_paths, 'PAIRS', 'EVAL_PAIRS', _EXAMPLE)
        rows = read(files=held_out_paths, validation_files=None)
        held_out = dataclasses.replace(
            rows, identity=cache.hash_cache_key('all held out', rows.identity), read_validation=rows.read
        )
        tasks.append(make(corpus=held_out, name=f'{task.name}_{name}'))
    return tasks
