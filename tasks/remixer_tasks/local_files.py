"""A user's own text files as a corpus, described in gin or flags alone (FILES, VALIDATION_FILES, TEXT_FIELD, ...)."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks.corpora import documents, parsing
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.files import cache
from remixer_tasks.files.text_files import LONGEST

Files = str | Sequence[str]


def corpus(
    files: Files,
    validation_files: Files | None = None,
    format: str | None = None,
    field: str | int = 'text',
    txt_documents: str = 'paragraph',
    validation_fraction: float = 0.01,
    strict: bool = False,
    longest: int = LONGEST,
) -> ParsedCorpus:
    """The documents of `files`: a path or glob, or a list of them; `~` and gs:// are understood.

    validation_files: held-out text; None holds out `validation_fraction` of the documents by their hash.
    format, field, txt_documents, longest: see `documents.Layout`.
    strict: a malformed or empty record is refused; otherwise it is skipped and counted.
    Raises UserError for a glob without files, a missing file and an unknown format; the files are read at first use.
    """
    layout = documents.Layout(format, field, txt_documents, longest)
    train = expand(files, 'FILES', layout.format_of)
    held_out = expand_held_out(validation_files, train, 'FILES', 'VALIDATION_FILES', layout.format_of)
    limit = [longest] if longest != LONGEST else []
    parts = [[state(path) for path in group] for group in (train, held_out or [])]
    name = f'{train[0]}' if len(train) == 1 else f'{len(train)} files ({train[0]}, ...)'
    identity = cache.key('local files', parts, format, field, txt_documents, *limit)
    return ParsedCorpus(
        name=name,
        identity=cache.key(identity, parsing.JOB_BYTES, parsing.MOST_JOBS),
        read=parsing.jobs(train, layout),
        read_validation=parsing.jobs(held_out, layout) if held_out else None,
        validation_fraction=validation_fraction,
        strict=strict,
    )


def expand_held_out(
    files: Files | None,
    train: Sequence[str],
    train_macro: str,
    macro: str,
    check: Callable[[str], object],
    example: str = '*.txt',
) -> list[str] | None:
    """`expand`, or None without `files`. Raises UserError for a file that is in `train` too."""
    if not files:
        return None
    held_out = expand(files, macro, check, example)
    both = sorted({os.path.realpath(path) for path in train} & {os.path.realpath(path) for path in held_out})
    if both:
        raise UserError(f'{both[0]} is in {train_macro} and in {macro}: leave it out of one of them')
    return held_out


def expand(files: Files, macro: str, check: Callable[[str], object], example: str = '*.txt') -> list[str]:
    """Sorted paths of all patterns, each once and each checked. Raises UserError, which names `macro`, and shows the
    glob `example`.
    """
    patterns = [files] if isinstance(files, str) else list(files)
    paths: set[str] = set()
    for pattern in patterns:
        expanded = os.path.abspath(os.path.expanduser(pattern)) if '://' not in pattern else pattern
        paths.update(_matches(expanded, pattern, macro, example))
    if not paths:
        raise UserError(f"{macro} is empty: give a path or glob, for example --gin.{macro}='~/data/{example}'")
    for path in sorted(paths):
        check(path)
    return sorted(paths)


def _matches(expanded: str, pattern: str, macro: str, example: str) -> list[str]:
    is_remote = '://' in expanded
    try:
        if not glob.has_magic(expanded):
            if not tf.io.gfile.exists(expanded):
                raise UserError(f'{macro} has {pattern}, which does not exist; correct the path')
            found = [expanded]
        else:
            found = tf.io.gfile.glob(expanded) if is_remote else glob.glob(expanded, recursive=True)
        found = [path for path in found if not tf.io.gfile.isdir(path)]
        special = [path for path in found if not is_remote and os.path.exists(path) and not os.path.isfile(path)]
        if special:
            raise UserError(f'{macro}: {special[0]} is a pipe or device, which is read once only; give files')
    except tf.errors.OpError as error:
        raise UserError(
            f'{macro}: {pattern} cannot be read ({error.message.splitlines()[0]}); give local files'
        ) from error
    if not found:
        if glob.has_magic(expanded):
            raise UserError(f'{macro}: {pattern} matches no file; correct the path or the pattern')
        raise UserError(
            f"{macro}: {pattern} is a folder; give files or a glob such as '{pattern.rstrip('/')}/{example}'"
        )
    return found


def state(path: str) -> list[str | int]:
    """What changes when the file's content does: path, bytes, time of the last change."""
    try:
        stat = tf.io.gfile.stat(path)
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0]
        raise UserError(
            f'{path} was there a moment ago, and cannot be read now ({reason}); type the command again'
        ) from error
    return [path, stat.length, stat.mtime_nsec]
