"""A user's own text files as a corpus, described in gin or flags alone (FILES, VALIDATION_FILES, TEXT_FIELD, ...)."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.lazy import tf
from remixer_tasks.corpora import documents, text_shards
from remixer_tasks.corpora.growing_text import GrowingCorpus
from remixer_tasks.corpora.parsing import TextFiles
from remixer_tasks.corpora.text_corpus import ParsedCorpus
from remixer_tasks.files import bounded_lines, cache

Files = str | Sequence[str]


def corpus(
    files: Files,
    validation_files: Files | None = None,
    format: str | None = None,
    field: str | int = 'text',
    txt_documents: str = 'paragraph',
    validation_fraction: float = 0.01,
    strict: bool = False,
    longest: ranges.Count = bounded_lines.LONGEST,
    token_cache_gb: ranges.NonNegative = 20.0,
    train_while_reading: bool = False,
) -> ParsedCorpus | GrowingCorpus:
    """The documents of `files`: a path or glob, or a list of them; `~` and gs:// are understood.

    validation_files: held-out text; None holds out `validation_fraction` of the documents by their hash.
    format, field, txt_documents, longest: see `documents.Layout`.
    strict: a malformed or empty record is refused; otherwise it is skipped and counted.
    token_cache_gb: most that the token ids of all corpora together may take in the cache folder; 0 keeps no new ones.
    train_while_reading: a run starts when the first volume of text is read, see `growing_text`; text of one volume, of
        less than 512 MiB, is read as a whole.
    Raises UserError for a glob without files, a missing file and an unknown format; the files are read at first use.
    """
    layout = documents.Layout(format, field, txt_documents, longest)
    train = expand(files, 'FILES', layout.format_of)
    held_out = expand_held_out(validation_files, train, 'FILES', 'VALIDATION_FILES', layout.format_of)
    limit = [longest] if longest != bounded_lines.LONGEST else []
    parts = [[state(path) for path in group] for group in (train, held_out or [])]
    name = f'{train[0]}' if len(train) == 1 else f'{len(train)} files ({train[0]}, ...)'
    identity = cache.key('local files', parts, format, field, txt_documents, *limit)
    text, held_out_text = TextFiles(train, layout), TextFiles(held_out, layout) if held_out else None
    if train_while_reading and text.source().count > 1:
        mixed, identity = TextFiles(text_shards.in_any_order(train), layout), cache.key('growing', identity)
        return GrowingCorpus(name, identity, mixed, held_out_text, validation_fraction, strict)
    return ParsedCorpus(
        name=name,
        identity=identity,
        read=text,
        read_validation=held_out_text,
        validation_fraction=validation_fraction,
        strict=strict,
        keep_ids=token_cache_gb * 1e9,
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
        # A file whose name has the characters of a pattern is itself.
        if not glob.has_magic(expanded) or (not is_remote and os.path.exists(expanded)):
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
