"""The one exception for a user's mistake; the command line prints it as one line, without a traceback."""


class UserError(ValueError):
    """Says on one line what was given, what is allowed, and what to type instead."""
