"""Progress lines on standard error."""

import sys
import time
from collections.abc import Callable

_REDRAW_SECONDS = 0.5


class Notice:
    """Reports progress by redrawing a line on a terminal, or by printing lines in a log."""

    def __init__(self, what: str):
        self._what = what
        self._steps, self._tenths = '', 0
        self._start = self._drawn = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._print(f'{what} ...', last=not self._terminal)

    def update(self, progress: Callable[[], str]) -> None:
        """Redraws the line at most twice per second; `progress` is called only to redraw."""
        if self._terminal and time.monotonic() - self._drawn > _REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._print(f'{self._what}: {self._steps}{progress()} ...', last=False)

    def step(self, number: int, total: int, things: str) -> None:
        """Adds progress, as in 'parsed 3 of 7 parts', unless the total is 1. In a log, prints a line every 10%."""
        if total == 1:
            return
        text = f'parsed {number} of {total} {things}'
        tenths = 10 * number // total
        if tenths > self._tenths and not self._terminal:
            self._print(f'{self._what}: {text}', last=True)
        self._steps, self._tenths = f'{text}, ', tenths

    def done(self, result: str) -> None:
        """Ends the line with the result and the elapsed seconds."""
        self._print(f'{self._what}: {result} ({time.monotonic() - self._start:.1f} s)', last=True)

    def _print(self, text: str, last: bool) -> None:
        start = '\r\x1b[2K' if self._terminal else ''
        print(start + text, end='\n' if last else '', file=sys.stderr, flush=True)
