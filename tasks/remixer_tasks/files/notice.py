"""One line on the screen for work that is done once and takes a while."""

import sys
import time
from collections.abc import Callable

_REDRAW_SECONDS = 0.5


class Notice:
    """Reports progress on stderr: redrawn on a terminal, and two plain lines (start, end) in a log."""

    def __init__(self, what: str):
        self._what = what
        self._start = self._drawn = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._print(f'{what} ...', last=not self._terminal)

    def update(self, progress: Callable[[], str]) -> None:
        """Redraws the line at most twice a second; `progress` is called only then."""
        if self._terminal and time.monotonic() - self._drawn > _REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._print(f'{self._what}: {progress()} ...', last=False)

    def done(self, result: str) -> None:
        """Ends the line with what came out and the seconds it took."""
        self._print(f'{self._what}: {result} ({time.monotonic() - self._start:.1f} s)', last=True)

    def _print(self, text: str, last: bool) -> None:
        start = '\r\x1b[2K' if self._terminal else ''
        print(start + text, end='\n' if last else '', file=sys.stderr, flush=True)
