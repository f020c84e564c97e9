"""Draws and places the next batches in a background thread while the device works on the current one.

The thread runs ahead, so the position of the data source is not the position of the training run. Therefore
the source is captured at fixed batch numbers, and a run's position is (captured state, batches drawn since):
restoring loads the state and draws that many batches again. If checkpoints have the same period, that number is zero
for a thread that was quick, and the period for one that had no time yet to capture: each process has its own number.
"""

import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

from remixer_t5x.data.position import Position
from remixer_t5x.errors import UserError


class Source(Protocol):
    """Batches without end, with a position (see `data.TrainBatches`): a state for each of its streams, by number."""

    def __next__(self) -> Any: ...
    def capture(self) -> dict[int, bytes]: ...
    def restore(self, states: Mapping[int, bytes]) -> None: ...
    def skip(self, streams: Collection[int]) -> None: ...


class Prefetcher:
    """Iterates over placed batches; `position()` is exact for the last batch. Use it as a context manager.

    `place` turns a host batch into device arrays. At most `depth` batches wait. If the thread raises an exception, the
    `next` of its batch raises it.
    """

    def __init__(
        self,
        source: Source,
        place: Callable[[Any], Any],
        start: Position | None = None,
        *,
        capture_period: int = 100,
        depth: int = 2,
        timeout: float = 900.0,
    ):
        start = start or Position()
        self._source, self._place = source, place
        self._period, self._timeout = capture_period, timeout
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        # In the order of their batches.
        self._captures = [start]
        self._consumed = start.batches
        self._thread = threading.Thread(target=self._produce, args=(start,), name='prefetch', daemon=True)
        self._thread.start()

    def _produce(self, start: Position) -> None:
        try:
            if any(start.states.values()):
                self._source.restore(start.states)
            again = itertools.count()
            while (streams := start.behind(next(again))) and not self._stop.is_set():
                self._source.skip(streams)
            drawn = start.batches
            while not self._stop.is_set():
                if drawn and drawn % self._period == 0:
                    captured = Position.captured(drawn, self._source.capture())
                    with self._lock:
                        self._captures.append(captured)
                batch = self._place(next(self._source))
                drawn += 1
                self._put((batch, None))
        except BaseException as error:
            # The consumer must always hear of an error: if the thread just ended, the consumer would hang.
            self._put((None, error))

    def _put(self, item: tuple[Any, BaseException | None]) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stop.is_set():
            raise RuntimeError('this prefetcher is closed')
        try:
            batch, error = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise UserError(
                f'the dataset gave no batch within {self._timeout:.0f} s; see with `remixer-t5x data` '
                'whether its preprocessors drop every example'
            ) from None
        if error is not None:
            self.close()
            raise error
        self._consumed += 1
        return batch

    def position(self) -> Position:
        """The position from which a new run gets the batch after the last one."""
        with self._lock:
            # Older captures are not needed any more, because the consumed count only grows.
            while len(self._captures) > 1 and self._captures[1].batches <= self._consumed:
                del self._captures[0]
            return dataclasses.replace(self._captures[0], batches=self._consumed)

    def close(self) -> None:
        """Stops the thread; waits at most ten seconds for a batch that is being drawn."""
        self._stop.set()
        self._thread.join(timeout=10.0)

    def __enter__(self) -> 'Prefetcher':
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
