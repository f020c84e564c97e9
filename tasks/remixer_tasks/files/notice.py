"""Prints progress to standard error."""

import sys
import time
from collections.abc import Callable

_REDRAW_SECONDS = 0.5


class Notice:
    """Reports progress by redrawing a line on a terminal, or by printing lines in a log."""

    def __init__(self, what: str):
        self._what = what
        self._tenths = 0
        self._start = self._drawn = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._print(f'{what} ...', last=not self._terminal)

    def update(self, progress: Callable[[], str]) -> None:
        """Redraws the line with the string that `progress` returns, at most twice per second; does nothing in a log."""
        if self._terminal and time.monotonic() - self._drawn > _REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._print(f'{self._what}: {progress()} ...', last=False)

    def step(self, number: int, total: int, things: str) -> None:
        """Reports progress as in 'parsed 3 of 7 parts', in a log only every 10%. Prints nothing if `total` is 1."""
        tenths = 10 * number // total
        if total > 1 and (self._terminal or tenths > self._tenths):
            self._tenths = tenths
            text = f'{self._what}: parsed {number} of {total} {things}'
            self._print(f'{text} ...' if self._terminal else text, last=not self._terminal)

    def done(self, result: str) -> None:
        """Prints the final line, with `result` and the elapsed seconds."""
        self._print(f'{self._what}: {result} ({time.monotonic() - self._start:.1f} s)', last=True)

    def _print(self, text: str, last: bool) -> None:
        start = '\r\x1b[2K' if self._terminal else ''
        print(start + text, end='\n' if last else '', file=sys.stderr, flush=True)
