"""The one exception for a user's mistake; the command line prints it as one line, without a traceback."""


class UserError(ValueError):
    """Says on one line what was given, what is allowed, and what to type instead."""


def one_line(text: str) -> str:
    """`text` without line ends and without control characters, with which a file's content could control a terminal."""
    line = ' '.join(text.split())
    return ''.join(character if character.isprintable() else '\N{REPLACEMENT CHARACTER}' for character in line)
