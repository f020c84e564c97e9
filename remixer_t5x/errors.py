"""The one exception for a user's mistake; the command line prints it as one line, without a traceback."""


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
