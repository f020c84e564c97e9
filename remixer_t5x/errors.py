"""Defines UserError, which commands print as one line without a traceback, and helpers that format messages."""

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Any


class UserError(ValueError):
    """An error that the user caused and can correct.

    The message is one line that states what is required, the actual value, and the command or setting to use instead.
    """


def root_cause_message(error: BaseException) -> str:
    """Returns the message of the root cause of an error, as one line of at most 300 characters.

    Follows the chain of `raise ... from` causes, because some libraries wrap errors in less informative ones.
    """
    while error.__cause__ is not None and not isinstance(error, UserError):
        error = error.__cause__
    text = to_one_line(str(getattr(error, 'strerror', None) or error))
    return (text if text and not isinstance(error, KeyError) else f'{type(error).__name__}: {text}')[:300]


def import_optional(module: str, user: str, extra: str) -> Any:
    """Imports an optional dependency of the feature `user`, or raises UserError with the installation command."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f'{user} needs {module.split(".")[0]}, which cannot be imported ({root_cause_message(error)}); run pip '
            'install '
            f"'remixer-t5x[{extra}]'"
        ) from error


def format_count(count: int, noun: str) -> str:
    """Returns a count with its noun, as in '1 row' and '1,000 rows'."""
    return f'{count:,} {noun}' if count == 1 else f'{count:,} {noun}s'


def to_one_line(text: str) -> str:
    """Returns `text` as one line without control characters, which could change the state of a terminal."""
    line = ' '.join(text.split())
    return ''.join(character if character.isprintable() else '\N{REPLACEMENT CHARACTER}' for character in line)


def suggest_similar_name(name: str, known: Iterable[str], key: Callable[[str], str] = str) -> str:
    """Returns `; did you mean X?`, or an empty string if no known name is similar. Ignores case.

    Compares `key(name)` with the keys of the known names. If `key(name)` is a prefix of the keys of one to three known
    names, suggests these names instead of the most similar name: for `t5`, suggests `t5_1_1` instead of `tim`.
    """
    # Of several names with the same key, keep the first in alphabetical order.
    by_key = {key(candidate).lower(): candidate for candidate in sorted({*known} - {name}, reverse=True)}
    word = key(name).lower()
    longer = sorted(by_key[candidate] for candidate in by_key if candidate.startswith(word))
    if len(word) > 1 and 1 <= len(longer) <= 3:
        return f'; did you mean {" or ".join(longer)}?'
    close = difflib.get_close_matches(word, by_key, n=1, cutoff=0.75)
    return f'; did you mean {by_key[close[0]]}?' if close else ''
