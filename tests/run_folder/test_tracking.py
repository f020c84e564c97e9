"""Trackers that raise or hang warn once and do not stop a run; the order of calls; run ids."""

import json
import threading

import pytest
from etils import epath

from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import trackers

LOSS = {'loss': 2.0}


class Recorder:
    """A tracker that records its calls, and calls `act` in each of them."""

    takes_files = True

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

    def add_files(self, name, kind, path):
        self._call('files', name, kind, path)

    def close(self):
        self._call('close')


def run_of(folder):
    return trackers.TrackedRun(epath.Path(folder), 3, {'TRAIN_STEPS': '5'})


@pytest.fixture
def track(tmp_path):
    """Returns a function that opens trackers, and the list of their warnings."""
    warnings = []
    return lambda *opened: trackers.BackgroundTrackers(opened, run_of(tmp_path), warnings.append), warnings


def test_every_call_arrives_in_order(track, tmp_path):
    open_trackers, warnings = track
    first = Recorder()
    both = open_trackers(first, other := Recorder())
    both.write('train', 4, LOSS, {'seconds': 1.0})
    both.rewind(3)
    both.add_files('config', 'config', tmp_path)
    both.close()
    expected = [
        ('open', 3), ('train', 4, LOSS, {'seconds': 1.0}), ('rewind', 3), ('files', 'config', 'config', tmp_path),
        ('close',),
    ]  # fmt: skip
    assert first.calls == other.calls == expected and not warnings
    assert both.takes_files and not open_trackers(trackers.TensorBoard()).takes_files


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


def test_an_id_is_created_once_for_a_folder_and_a_tracker(tmp_path):
    folder = epath.Path(tmp_path)
    first = trackers.get_or_create_run_id(folder, 'wandb')
    assert trackers.get_or_create_run_id(folder, 'wandb') == first != trackers.get_or_create_run_id(folder, 'other')
    assert json.loads((tmp_path / trackers.IDS_FILE).read_text())['wandb'] == first
    for damaged in ('{', '[]', '{"wandb": "../x"}', '{"wandb": 3.5}'):
        (tmp_path / trackers.IDS_FILE).write_text(damaged)
        with pytest.raises(UserError, match='move it to another folder, so that the run gets a new id'):
            trackers.get_or_create_run_id(folder, 'wandb')
