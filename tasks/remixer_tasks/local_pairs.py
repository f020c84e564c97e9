"""A user's own labelled rows as pairs of texts, described in gin or flags alone (PAIRS, INPUTS, TARGETS, ...)."""

import functools
import string
from collections.abc import Iterator, Sequence

from remixer_tasks.files import bounded_lines, cache, row_files
from remixer_tasks.files.malformed import Malformed
from remixer_tasks.local_files import Files, expand, state
from remixer_tasks.text.text_corpus import ParsedCorpus
from remixer_tasks.text_pairs import encode_pair, format_template


def corpus(
    files: Files,
    inputs: str = 'inputs',
    targets: str = 'targets',
    validation_files: Files | None = None,
    format: str | None = None,
    validation_fraction: float = 0.01,
    strict: bool = False,
    longest: int = bounded_lines.LONGEST,
) -> ParsedCorpus:
    """Pairs for `text_pairs.task`, of the rows of `files`: a path or glob, or a list of them.

    inputs, targets: a column (a field, of JSON lines), or a template with columns in braces, as in
        'premise: {premise} hypothesis: {hypothesis}'.
    validation_files: held-out rows; None holds out `validation_fraction` of the rows by their hash.
    format, longest: see `row_files.RowLayout`.
    strict: a row that cannot be read or lacks a value is refused; otherwise it is skipped and counted.
    Raises UserError for a glob without files, a missing file and an unknown format; the files are read at first use.
    """
    layout = row_files.RowLayout(format, longest)
    train = expand(files, 'PAIRS', layout.format_of)
    held_out = expand(validation_files, 'VALIDATION_PAIRS', layout.format_of) if validation_files else None
    read = functools.partial(_pairs, layout=layout, inputs=inputs, targets=targets)
    parts = [[state(path) for path in group] for group in (train, held_out or [])]
    return ParsedCorpus(
        name=f'{train[0]}' if len(train) == 1 else f'{len(train)} files ({train[0]}, ...)',
        identity=cache.key('local pairs', parts, format, inputs, targets, longest),
        read=functools.partial(read, train),
        read_validation=functools.partial(read, held_out) if held_out else None,
        validation_fraction=validation_fraction,
        strict=strict,
    )


def _pairs(
    paths: Sequence[str], malformed: Malformed, layout: row_files.RowLayout, inputs: str, targets: str
) -> Iterator[str]:
    needed = [*_columns(inputs), *_columns(targets)]
    for path in paths:
        for number, row in row_files.read(path, layout, malformed):
            missing = [name for name in needed if name in row and row[name] is None]
            if missing:
                malformed.record(path, number, f'column {missing[0]} is empty')
                continue
            texts = format_template(inputs, row, 'INPUTS'), format_template(targets, row, 'TARGETS')
            try:
                yield encode_pair(*texts)
            except ValueError as error:
                malformed.record(path, number, str(error))


def _columns(template: str) -> list[str]:
    """Names of the columns that a template reads; a wrong one is left for `format_template` to tell."""
    if not set(template) & set('{}'):
        return [template]
    try:
        return [name.partition('[')[0] for _, name, _, _ in string.Formatter().parse(template) if name]
    except ValueError:
        return []
