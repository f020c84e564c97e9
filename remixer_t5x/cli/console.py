"""Prints tables and lines to standard output, using the width of the terminal or a fixed width for pipes.

Also protects commands from write errors of standard streams, for example if a pipe is closed or a disk is full, and
hides log lines and warnings of libraries.
"""

import errno
import io
import logging
import os
import signal
import sys
import threading
import warnings
from typing import Any

from remixer_t5x import lazy_imports
from remixer_t5x.errors import UserError

# asyncio and Orbax (through absl) log tracebacks of failed writes. The checkpoint manager reports these errors itself.
_REPORTED_ELSEWHERE = ('absl', 'asyncio')
_LOGGERS = ('jax', 'orbax', 'tensorflow', 'datasets', 'matplotlib')


def print_with_rich(*parts: Any, pipe_width: int = 150) -> None:
    """Prints rich tables, and strings without line wrapping.

    `pipe_width` is the table width if the output is not a terminal.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else pipe_width
    # Names of tasks and groups of metrics may contain brackets and colons.
    console = Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        text = isinstance(part, str)
        if not text:
            # Prints wide tables at full width and lets the terminal wrap them, so that numbers are never truncated.
            widest = console.measure(part, options=console.options.update(width=10_000)).maximum
            console.width = max(console.width, widest)
        console.print(part, soft_wrap=text)
    sys.stdout.flush()


def print_labeled_line(label: str, text: str) -> None:
    """Prints a progress line and flushes standard output, because converting a large model takes minutes."""
    print(f'{label:<12} {text}', flush=True)


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


class _StandardStream(io.FileIO):
    """A standard stream that ignores write errors, or ends the command at the first one.

    The command ends with the code that shells report for SIGPIPE if the reader closed the pipe, and with a UserError
    after any other write error.
    """

    ignores_errors = True

    def write(self, data):
        try:
            # `write` returns None if the terminal is in non-blocking mode and not ready.
            return super().write(data) or len(data)
        except OSError as error:
            if not self.ignores_errors:
                self.ignores_errors = True
                if error.errno == errno.EPIPE:
                    raise SystemExit(128 + signal.SIGPIPE) from None
                raise UserError(f'standard output cannot be written ({error.strerror}); use another disk') from None
        return len(data)


def protect_standard_streams() -> None:
    """Replaces standard output and error of this process by streams that handle write errors.

    First opens /dev/null for closed streams, so that no other file gets their descriptors.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` returns the lowest free descriptor, which is the closed one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Streams that the caller (for example, pytest) has replaced are not changed.
    if sys.stdout is sys.__stdout__:
        sys.stdout = _build_text_stream(1, sys.stdout)
        sys.stdout.buffer.raw.ignores_errors = False
    if sys.stderr is sys.__stderr__:
        sys.stderr = _build_text_stream(2, sys.stderr)


def _build_text_stream(descriptor: int, before: Any) -> Any:
    return io.TextIOWrapper(
        io.BufferedWriter(_StandardStream(descriptor, 'w', closefd=False)),
        # Escapes characters that the locale cannot encode, for example in file names.
        encoding='utf-8' if before is None else before.encoding,
        errors='backslashreplace',
        line_buffering=before is None or before.line_buffering or before.write_through,
    )


def ignore_stdout_errors() -> None:
    """Ignores write errors of standard output from now on."""
    raw = getattr(getattr(sys.stdout, 'buffer', None), 'raw', None)
    if isinstance(raw, _StandardStream):
        raw.ignores_errors = True


def _handle_unraisable(unraisable: 'sys.UnraisableHookArgs') -> None:
    """Hides errors that Python ignores, but sends Ctrl-C again.

    TensorStore's threads report failed writes to an event loop that is already closed. Ctrl-C during a garbage
    collection raises KeyboardInterrupt in JAX's callback, where Python ignores it.
    """
    if unraisable.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def silence_library_logs() -> None:
    """Hides library warnings and log lines below ERROR from now on."""
    lazy_imports.set_log_levels()
    warnings.simplefilter('ignore')
    logging.basicConfig(level=logging.ERROR, format='%(name)s: %(message)s')
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _REPORTED_ELSEWHERE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _handle_unraisable
    logging.getLogger('remixer_t5x').setLevel(logging.WARNING)
