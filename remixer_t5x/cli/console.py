"""Prints tables and lines to standard output, using the width of the terminal or a fixed width for pipes."""

import sys
from typing import Any


def print_items(*parts: Any, pipe_width: int = 150) -> None:
    """Prints rich tables and unwrapped strings. `pipe_width` is the table width if the output is not a terminal."""
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else pipe_width, highlight=False)
    for part in parts:
        text = isinstance(part, str)
        if not text:
            # Prints wide tables at full width and lets the terminal wrap them, so that numbers are never truncated.
            widest = console.measure(part, options=console.options.update(width=10_000)).maximum
            console.width = max(console.width, widest)
        console.print(part, soft_wrap=text, markup=not text)
    sys.stdout.flush()


def build_table(*headings: str, words: tuple[str, ...] = (), wraps: bool = False, **options: Any) -> Any:
    """Returns a rich table without a frame.

    Columns whose heading is in `words` are left-aligned, and all others are right-aligned. With `wraps`, all columns
    are left-aligned, and all columns except the first are wrapped.
    """
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, **options)
    for heading in headings:
        justify: Any = 'left' if wraps or heading in words else 'right'
        result.add_column(heading, justify=justify, overflow='fold', no_wrap=not wraps or heading == headings[0])
    return result
