"""Prints tables and lines on standard output, in the width of the terminal or of a pipe."""

import sys
from typing import Any


def show(*parts: Any, pipe_width: int = 150) -> None:
    """Prints rich tables, and texts, which are not wrapped; `pipe_width` is for output that is not a terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else pipe_width, highlight=False)
    for part in parts:
        text = isinstance(part, str)
        if not text:
            # The terminal wraps a wide table; numbers are not truncated.
            widest = console.measure(part, options=console.options.update(width=10_000)).maximum
            console.width = max(console.width, widest)
        console.print(part, soft_wrap=text, markup=not text)
    sys.stdout.flush()


def table(*headings: str, words: tuple[str, ...] = (), **options: Any) -> Any:
    """A rich table without frame; the columns `words` are left-aligned, the others right-aligned."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, **options)
    for heading in headings:
        result.add_column(heading, justify='left' if heading in words else 'right', no_wrap=True)
    return result
