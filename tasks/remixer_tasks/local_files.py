"""Builds corpora from local text files, set up with gin macros or flags (FILES, VALIDATION_FILES, TEXT_FIELD, ...)."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks.corpora import documents
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.files import cache
from remixer_tasks.files.row_files import MAX_CHARACTERS

Files = str | Sequence[str]


def corpus(
    files: Files,
    validation_files: Files | None = None,
    format: str | None = None,
    field: str | int = 'text',
    txt_documents: str = 'paragraph',
    validation_fraction: float = 0.01,
    strict: bool = False,
    longest: ranges.Count = MAX_CHARACTERS,
) -> ParsedCorpus:
    """Returns a corpus of text files, which are parsed at first use.

    Args:
        files: a path or glob, or a list of paths and globs, which may begin with `~` or gs://.
        validation_files: files with held-out documents; None holds out `validation_fraction` of all documents by hash.
        format: one of `documents.FORMATS`; None detects the format from the file extension.
        field: JSON field, column name or column number that contains the text.
        txt_documents: what a document in a txt file is, one of `documents.TXT_DOCUMENTS`.
        longest: maximum number of characters of a line or document.
        strict: whether to raise UserError for a malformed or empty record instead of skipping and counting it.
    """
    layout = documents.Layout(format, field, txt_documents, longest)
    train = expand_paths(files, 'FILES')
    held_out = expand_held_out_paths(validation_files, train, 'FILES', 'VALIDATION_FILES')
    states = [[cache.file_state(path) for path in group] for group in (train, held_out)]
    settings = (format, field, txt_documents, longest, documents.JOB_BYTES, documents.MAX_JOBS)
    return ParsedCorpus(
        name=describe_files(train),
        identity=cache.hash_values('local files 2', states, *settings),
        read=documents.split_into_jobs(states[0], layout),
        read_validation=documents.split_into_jobs(states[1], layout) if held_out else None,
        validation_fraction=validation_fraction,
        strict=strict,
    )


def describe_files(paths: Sequence[str]) -> str:
    """Returns a name for these files, to print in messages."""
    return paths[0] if len(paths) == 1 else f'{len(paths)} files ({paths[0]}, ...)'


def expand_held_out_paths(
    files: Files | None, train: Sequence[str], train_macro: str, macro: str, example: str = '*.txt'
) -> list[str]:
    """Expands held-out `files` to paths; returns [] for None. Raises UserError for a file that is also in `train`."""
    held_out = expand_paths(files, macro, example) if files else []
    if both := sorted({os.path.realpath(path) for path in train} & {os.path.realpath(path) for path in held_out}):
        raise UserError(f'{macro} and {train_macro} must not share files, got {both[0]} in both; remove it from one')
    return held_out


def expand_paths(files: Files, macro: str, example: str = '*.txt') -> list[str]:
    """Expands paths and globs to sorted distinct paths. Error messages use the setting `macro` and glob `example`."""
    paths: set[str] = set()
    for pattern in [files] if isinstance(files, str) else files:
        paths.update(_match_files(pattern, macro, example))
    if not paths:
        raise UserError(f"{macro} must be a path or glob, got none; pass --gin.{macro}='~/data/{example}'")
    return sorted(paths)


def _match_files(pattern: str, macro: str, example: str) -> list[str]:
    is_remote = '://' in pattern
    path = pattern if is_remote else os.path.abspath(os.path.expanduser(pattern))
    try:
        # The path of an existing file may contain glob characters.
        if glob.has_magic(path) and (is_remote or not os.path.exists(path)):
            matches = tf.io.gfile.glob(path) if is_remote else glob.glob(path, recursive=True)
        else:
            matches = [path] if tf.io.gfile.exists(path) else []
        files = [match for match in matches if not tf.io.gfile.isdir(match)]
    except tf.errors.OpError as error:
        raise UserError(
            f'{macro}: {pattern} cannot be read ({error.message.splitlines()[0]}); use local files'
        ) from error
    if not files and matches:
        raise UserError(
            f"{macro} must be files, got the folder {pattern}; use a glob such as '{pattern.rstrip('/')}/{example}'"
        )
    if not files:
        raise UserError(
            f'{macro} must be an existing path or match a file, got {pattern}; correct the path or the pattern'
        )
    return files
