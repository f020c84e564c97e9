"""Calls trackers in threads of their own: one that raises, hangs or is slow costs a warning and its own numbers."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

from etils import epath

from remixer_t5x.run_folder.trackers import Session, TrackedRun, Tracker

# Calls that wait for a slow tracker; more are dropped.
MOST_WAITING = 1000
# How long the end of a run waits for each tracker, such as for uploads. The environment may say otherwise.
SECONDS = float(os.environ.get('REMIXER_T5X_TRACKER_SECONDS', '120'))
Act = Callable[[Session], None]


class Tracking:
    """Trackers of one run. No method raises or waits, except that `close` waits for a while."""

    def __init__(self, trackers: Sequence[Tracker], run: TrackedRun, say: Callable[[str], None]):
        self._threads = [_Thread(tracker, run, say) for tracker in trackers]
        self.takes_files = any(tracker.takes_files for tracker in trackers)

    def write(self, kind: str, step: int, numbers: Mapping[str, float], timing: Mapping[str, float]) -> None:
        numbers, timing = dict(numbers), dict(timing)
        self._each(lambda session: session.write(kind, step, numbers, timing))

    def rewind(self, step: int) -> None:
        """The run goes back to `step`."""
        self._each(lambda session: session.rewind(step))

    def add_files(self, name: str, kind: str, path: epath.Path) -> None:
        """A file or folder to keep with the run."""
        self._each(lambda session: session.add_files(name, kind, path))

    def close(self, seconds: float | None = None) -> None:
        """Ends all trackers, and waits up to `seconds` for each."""
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.wait(SECONDS if seconds is None else seconds)

    def _each(self, act: Act) -> None:
        for thread in self._threads:
            thread.put(act)


class _Thread:
    """The thread of one tracker, and what waits for it. It is a daemon: Python may exit while a tracker hangs."""

    def __init__(self, tracker: Tracker, run: TrackedRun, say: Callable[[str], None]):
        self._tracker, self._tracked, self._say = tracker, run, say
        self._name = type(tracker).__name__
        self._waiting: queue.Queue[Act | None] = queue.Queue(MOST_WAITING)
        self._warned = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f'tracker {self._name}', daemon=True)
        self._thread.start()

    def put(self, act: Act) -> None:
        if self._thread.is_alive():
            try:
                self._waiting.put_nowait(act)
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
            session = self._tracker.open(self._tracked)
        except BaseException as error:
            return self._warn(f'cannot start ({_reason(error)})')
        while (act := self._waiting.get()) is not None:
            self._call(act, session)
        self._call(lambda session: session.close(), session)

    def _call(self, act: Act, session: Session) -> None:
        try:
            act(session)
        except BaseException as error:
            self._warn(f'failed ({_reason(error)})')

    def _warn(self, what: str) -> None:
        """The first trouble of a tracker in one line; later ones say nothing new."""
        if self._warned.acquire(blocking=False):
            self._say(f'warning: the tracker {self._name} {what}; training continues')


def _reason(error: BaseException) -> str:
    return ' '.join(str(error).split()) or type(error).__name__
