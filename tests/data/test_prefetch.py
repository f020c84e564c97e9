"""The prefetch thread: order, exact positions, exceptions and closing."""

import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.data.prefetch import DataPosition, Prefetcher
from remixer_t5x.errors import UserError

START = DataPosition.create_at_start(1)


class Counter:
    """Returns 0, 1, 2, ...; the state is the next number. Raises an error at `error_at`."""

    def __init__(self, error_at=None):
        self.number, self.error_at = 0, error_at

    def __next__(self):
        if self.number == self.error_at:
            raise UserError('notes.jsonl line 7 is not JSON')
        self.number += 1
        return self.number - 1

    def capture_states(self):
        return {0: str(self.number).encode()}

    def restore_states(self, states):
        self.number = int(states[0])

    def skip_batches(self, streams):
        assert list(streams) == [0]
        next(self)


def wait_until(condition):
    """Waits for another thread, for at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 23), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 4))
def test_resumed_runs_return_every_batch_once(lengths, period, depth):
    position, seen = START, []
    for length in lengths:
        with Prefetcher(Counter(), lambda n: n, position, capture_period=period, depth=depth) as batches:
            seen += [next(batches) for _ in range(length)]
            records = json.loads(json.dumps(batches.get_position().to_json()))
            position = DataPosition.from_json([records['0']])
        assert position.batches == len(seen)
        assert position.batches - position.captured_at[0] < period or position.batches < period + len(seen)
    assert seen == list(range(sum(lengths)))


def test_old_captures_are_dropped_without_a_checkpoint():
    with Prefetcher(Counter(), lambda n: n, START, capture_period=1, depth=2) as batches:
        for _ in range(50):
            next(batches)
            assert len(batches._captures) <= 6


def test_a_failed_capture_raises_an_error_until_the_next_capture(monkeypatch):
    counter, capture = Counter(), Counter.capture_states

    def fail_at_4(self):
        if self.number == 4:
            raise UserError('the position cannot be written')
        return capture(self)

    monkeypatch.setattr(Counter, 'capture_states', fail_at_4)
    with Prefetcher(counter, lambda n: n, START, capture_period=2, depth=1) as batches:
        for number in range(3):
            assert next(batches) == number
        wait_until(lambda: counter.number == 5)
        with pytest.raises(UserError, match='cannot be written'):
            batches.get_position()
        for number in range(3, 6):
            assert next(batches) == number
        wait_until(lambda: counter.number >= 7)
        assert batches.get_position() == DataPosition(6, {0: 6}, {0: b'6'})


def test_an_error_in_the_thread_is_raised_at_its_batch():
    with Prefetcher(Counter(error_at=7), lambda n: n, START, depth=3) as batches:
        assert [next(batches) for _ in range(7)] == list(range(7))
        with pytest.raises(UserError, match='line 7'):
            next(batches)
    assert not [t for t in threading.enumerate() if t.name == 'prefetch']


def test_a_blocked_source_raises_an_error_after_the_timeout():
    release = threading.Event()

    class Blocked(Counter):
        def __next__(self):
            release.wait()
            return 0

    with Prefetcher(Blocked(), lambda n: n, START, timeout=0.05) as batches:
        with pytest.raises(UserError, match='no batch within'):
            next(batches)
        release.set()


def test_the_thread_reads_at_most_depth_plus_one_batches_ahead():
    source = Counter()
    with Prefetcher(source, lambda n: n, START, depth=3) as batches:
        for requested in range(1, 50):
            assert next(batches) == requested - 1
            # `requested` were returned, three are queued, and the thread holds one.
            assert source.number <= requested + 4
        wait_until(lambda: source.number == requested + 4)
