"""The one exception for a user's mistake; the command line prints it as one line, without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Says on one line what was given, what is allowed, and what to type instead."""


def reason(error: BaseException) -> str:
    """Describes the root cause of a library's error on one line of at most 300 characters.

    Follows `raise ... from`, because some libraries wrap an error in one that only says that something failed.
    """
    while error.__cause__ is not None and not isinstance(error, UserError):
        error = error.__cause__
    text = one_line(str(getattr(error, 'strerror', None) or error))
    return (text if text and not isinstance(error, KeyError) else f'{type(error).__name__}: {text}')[:300]


def one_line(text: str) -> str:
    """`text` without line ends and without control characters, with which a file's content could control a terminal."""
    line = ' '.join(text.split())
    return ''.join(character if character.isprintable() else '\N{REPLACEMENT CHARACTER}' for character in line)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or nothing when no known name is close. Case never separates two names.

    A name that is the beginning of a few known names means one of them: `models/t5.gin` is not a misspelt `models/tim`.
    """
    # Of names that differ in case alone, the last one is that with the most letters of the same case.
    known = sorted({*known} - {name}, key=lambda candidate: (sum(map(str.__eq__, candidate, name)), candidate))
    by_lower = {candidate.lower(): candidate for candidate in known}
    begun = name.lower().removesuffix('.gin')
    longer = sorted(by_lower[candidate] for candidate in by_lower if candidate.startswith(begun))
    if len(begun.rpartition('/')[2]) > 1 and 1 <= len(longer) <= 3:
        return f'; did you mean {" or ".join(longer)}?'
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f'; did you mean {by_lower[close[0]]}?' if close else ''
