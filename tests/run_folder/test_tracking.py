"""Trackers that raise or hang warn once and do not stop a run; the order of calls."""

import threading

import pytest
from etils import epath

from remixer_t5x.run_folder import trackers

LOSS = {'loss': 2.0}


class Recorder:
    """A tracker that records its calls, and calls `act` in each of them."""

    def __init__(self, act=lambda: None, opening=lambda: None):
        self.calls, self._act, self._opening = [], act, opening

    def open(self, run):
        self._opening()
        self.calls.append(('open', run.restored_step))
        return self

    def _call(self, *arguments):
        self._act()
        self.calls.append(arguments)

    def write(self, kind, step, numbers, timing):
        self._call(kind, step, numbers, timing)

    def rewind(self, step):
        self._call('rewind', step)

    def close(self):
        self._call('close')


def run_of(folder):
    return trackers.TrackedRun(epath.Path(folder), 3, {'TRAIN_STEPS': '5'})


@pytest.fixture
def track(tmp_path):
    """Returns a function that opens trackers, and the list of their warnings."""
    warnings = []
    return lambda *opened: trackers.BackgroundTrackers(opened, run_of(tmp_path), warnings.append), warnings


def test_every_call_arrives_in_order(track):
    open_trackers, warnings = track
    first = Recorder()
    both = open_trackers(first, other := Recorder())
    both.write('train', 4, LOSS, {'seconds': 1.0})
    both.rewind(3)
    both.close()
    expected = [('open', 3), ('train', 4, LOSS, {'seconds': 1.0}), ('rewind', 3), ('close',)]
    assert first.calls == other.calls == expected and not warnings


def test_a_tracker_that_raises_warns_once_and_others_get_everything(track):
    def refuse():
        raise OSError('no network\nand more')

    open_trackers, warnings = track
    both = open_trackers(Recorder(refuse), other := Recorder(), Recorder(opening=refuse))
    for step in range(9):
        both.write('train', step, LOSS, {})
    both.close()
    assert len(other.calls) == 11
    assert sorted(warnings) == [
        'warning: the tracker Recorder could not start (no network and more); training continues',
        'warning: the tracker Recorder failed (no network and more); training continues',
    ]


def test_a_tracker_that_hangs_delays_nothing(track):
    open_trackers, warnings = track
    hanging = open_trackers(Recorder((forever := threading.Event()).wait))
    for step in range(9):
        hanging.write('train', step, LOSS, {})
    hanging.close(0.01)
    assert len(warnings) == 1 and 'has not closed within 0.01 s' in warnings[0]
    forever.set()
