"""Prefetches batches in a background thread, and tracks the exact position of the last consumed batch.

The thread runs ahead of the training loop, and periodically captures the state of the batch source. A data position
consists of a captured state and the number of batches consumed after the capture. When the position is restored, these
batches are skipped; usually there are none if the capture period equals the checkpoint period. Processes may capture
their states at different batches.

This module must not import TensorFlow, because the checkpoint code imports this module.
"""

import base64
import dataclasses
import itertools
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from remixer_t5x.errors import UserError


@dataclasses.dataclass(frozen=True)
class DataPosition:
    """The data position of a run after it has consumed `batches` batches.

    `states` contains the captured state of each stream (b'' at the start of the data). `captured_at` contains, for each
    stream, the number of batches that were read before its state was captured.
    """

    batches: int = 0
    captured_at: Mapping[int, int] = dataclasses.field(default_factory=lambda: {0: 0})
    states: Mapping[int, bytes] = dataclasses.field(default_factory=lambda: {0: b''})

    @classmethod
    def from_states(cls, batches: int, states: Mapping[int, bytes]) -> 'DataPosition':
        """Returns the position after `batches` batches, where `states` are the stream states at this position."""
        return cls(batches, dict.fromkeys(states, batches), states)

    @classmethod
    def create_at_start(cls, streams: int) -> 'DataPosition':
        """Returns the position before the first batch of data that is split into `streams` streams."""
        return cls.from_states(0, dict.fromkeys(range(streams), b''))

    @property
    def has_stream_states(self) -> bool:
        """Whether the position contains stream states; False after reading batches with SAVE_DATA_POSITION=False."""
        return all(self.states[index] or not at for index, at in self.captured_at.items())

    def to_json(self) -> dict[str, dict[str, Any]]:
        """Returns a dictionary that maps each stream number (as a string) to the stream's JSON record."""
        return {
            str(index): {
                'batches': self.batches,
                'captured_at': self.captured_at[index],
                'state': base64.b64encode(zlib.compress(state, 1)).decode('ascii'),
            }
            for index, state in self.states.items()
        }

    @classmethod
    def from_json(cls, records: Sequence[dict[str, Any]]) -> 'DataPosition':
        """Returns the position described by the JSON records of all streams. The records are in stream order."""
        states = {index: zlib.decompress(base64.b64decode(record['state'])) for index, record in enumerate(records)}
        captured_at = {index: record['captured_at'] for index, record in enumerate(records)}
        return cls(records[0]['batches'], captured_at, states)


class Prefetcher:
    """Iterates over prefetched batches. On exit, the context manager stops the prefetch thread.

    `source` is a `task_batches.TrainBatches` or another endless iterator with the same methods, and `start` contains a
    state for each of its streams. `place` transfers a batch to the devices. The state of the source is captured every
    `capture_period` batches. At most `depth` batches are queued, and `timeout` is the maximum number of seconds to wait
    for a batch.
    """

    def __init__(
        self,
        source: Any,
        place: Callable[[Any], Any],
        start: DataPosition,
        *,
        capture_period: int = 100,
        depth: int = 2,
        timeout: float = 900.0,
    ):
        self._source, self._place = source, place
        self._period, self._timeout = capture_period, timeout
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        # Captured positions in ascending order.
        self._captures = [start]
        # The error of the last capture; None if the capture succeeded.
        self._failure: UserError | None = None
        self._consumed = start.batches
        self._thread = threading.Thread(target=self._produce_batches, args=(start,), name='prefetch', daemon=True)
        self._thread.start()

    def _produce_batches(self, start: DataPosition) -> None:
        try:
            if any(start.states.values()):
                self._source.restore_states(start.states)
            for skipped in itertools.count():
                streams = [index for index, at in start.captured_at.items() if start.batches - at > skipped]
                if not streams or self._stop.is_set():
                    break
                self._source.skip_batches(streams)
            drawn = start.batches
            while not self._stop.is_set():
                if drawn and drawn % self._period == 0:
                    self._capture_state(drawn)
                batch = self._place(next(self._source))
                drawn += 1
                self._enqueue_batch((batch, None))
        except BaseException as error:
            # Queue the error, because the consumer would otherwise wait forever.
            self._enqueue_batch((None, error))

    def _capture_state(self, drawn: int) -> None:
        failure, captures = None, []
        try:
            captures = [DataPosition.from_states(drawn, self._source.capture_states())]
        except UserError as error:
            failure = error
        with self._lock:
            self._failure = failure
            self._captures += captures
            self._drop_old_captures()

    def _drop_old_captures(self) -> None:
        """Drops all captured positions before the newest one that does not follow the last consumed batch."""
        while len(self._captures) > 1 and self._captures[1].batches <= self._consumed:
            del self._captures[0]

    def _enqueue_batch(self, item: tuple[Any, BaseException | None]) -> None:
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
                f'the dataset returned no batch within {self._timeout:.0f} s; check with `remixer-t5x data` whether '
                'the preprocessors drop all examples'
            ) from None
        if error is not None:
            self.close()
            raise error
        self._consumed += 1
        return batch

    def get_position(self) -> DataPosition:
        """Returns the exact position after the last consumed batch. Raises UserError if the last capture failed."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._drop_old_captures()
            return dataclasses.replace(self._captures[0], batches=self._consumed)

    def close(self) -> None:
        """Stops the thread. Waits up to ten seconds for the batch that the thread is reading."""
        self._stop.set()
        self._thread.join(timeout=10.0)

    def __enter__(self) -> 'Prefetcher':
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
