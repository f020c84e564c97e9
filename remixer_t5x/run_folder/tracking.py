"""Calls each tracker in a thread of its own: one that raises, hangs or is slow only warns and loses its own metrics."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from etils import epath

from remixer_t5x.run_folder.trackers import Session, TrackedRun, Tracker

# Maximum number of calls that wait for a slow tracker; more are dropped.
MOST_WAITING = 1000
# Seconds that the end of a run waits for each tracker, for example for uploads.
SECONDS = float(os.environ.get('REMIXER_T5X_TRACKER_SECONDS', '120'))
Call = Callable[[Session], None]


class Tracking:
    """Forwards a run's metrics to its trackers. No method raises or waits, except that `close` waits for a while."""

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun, warn: Callable[[str], None]):
        self._threads = [_Thread(tracker, run, warn) for tracker in trackers]
        self.takes_files = any(tracker.takes_files for tracker in trackers)

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        numbers, timing = dict(numbers), dict(timing)
        self._call_all(lambda session: session.write(kind, step, numbers, timing))

    def rewind(self, step: int) -> None:
        """Reports that the run goes back to `step`."""
        self._call_all(lambda session: session.rewind(step))

    def add_files(self, name: str, kind: str, path: epath.Path) -> None:
        """Stores a file or folder with the run."""
        self._call_all(lambda session: session.add_files(name, kind, path))

    def close(self, seconds: float | None = None) -> None:
        """Ends all trackers, and waits up to `seconds` for each."""
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.wait(SECONDS if seconds is None else seconds)

    def _call_all(self, call: Call) -> None:
        for thread in self._threads:
            thread.put(call)


class _Thread:
    """The thread of one tracker and its queue of calls. A daemon, so that Python exits while a tracker hangs."""

    def __init__(self, tracker: Tracker, run: TrackedRun, warn: Callable[[str], None]):
        self._tracker, self._run, self._warn_user = tracker, run, warn
        self._name = type(tracker).__name__
        self._waiting: queue.Queue[Call | None] = queue.Queue(MOST_WAITING)
        self._warned = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f'tracker {self._name}', daemon=True)
        self._thread.start()

    def put(self, call: Call) -> None:
        if self._thread.is_alive():
            try:
                self._waiting.put_nowait(call)
            except queue.Full:
                self._warn(f'is {MOST_WAITING} records behind, and gets no more until it catches up')

    def end(self) -> None:
        while self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                return self._waiting.put_nowait(None)
            with contextlib.suppress(queue.Empty):
                self._waiting.get_nowait()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f'has not ended within {seconds:g} s; what it has not sent is lost')

    def _serve(self) -> None:
        try:
            session = self._tracker.open(self._run)
        except BaseException as error:
            return self._warn(f'cannot start ({_reason(error)})')
        while (call := self._waiting.get()) is not None:
            self._call(call, session)
        self._call(lambda session: session.close(), session)

    def _call(self, call: Call, session: Session) -> None:
        try:
            call(session)
        except BaseException as error:
            self._warn(f'failed ({_reason(error)})')

    def _warn(self, what: str) -> None:
        """Prints the first failure of a tracker in one line; later ones are not printed."""
        if self._warned.acquire(blocking=False):
            self._warn_user(f'warning: the tracker {self._name} {what}; training continues')


def _reason(error: BaseException) -> str:
    return ' '.join(str(error).split()) or type(error).__name__
