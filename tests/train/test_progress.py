"""The progress line, the speed, and the time by activity."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remixer_t5x.train import progress

TIMING = {'seconds_per_step': 0.5, 'tokens_per_second': 12345.6}


def test_a_progress_line_shows_loss_rate_speed_and_remaining_time():
    line = progress.format_progress(300, 1000, {'loss': 4.8123, 'learning_rate': 0.0123}, {**TIMING, 'mfu': 0.413})
    assert line == 'step 300/1000 · loss 4.8123 · rate 0.012 · 12,346 tokens/s · MFU 41% · 0:05:50 left'


def test_the_speed_excludes_pauses():
    now = [0.0]
    timeline = progress.ActivityTimer(lambda: now[0])
    clock = progress.SpeedMeter(progress.StepCost(flops=50.0, peak=1000.0, devices=2), 10, timeline)

    def spend(seconds, *activities):
        with contextlib.ExitStack() as stack:
            for name in activities:
                stack.enter_context(timeline.measure_activity(name))
            now[0] += seconds

    for batch in (80, 120):
        clock.add_batch(batch)
        spend(0.75, progress.STEPS, progress.WAITING_FOR_DATA)
        spend(1.25, progress.STEPS)
        spend(1.5, progress.STEPS, progress.EVALUATION)
    lap = clock.measure_speed(12)
    assert lap.pop('host_mib') > 10
    speed = {'tokens_per_second': 50.0, 'tokens_per_second_per_device': 25.0}
    assert lap == {'seconds_per_step': 2.0, **speed, 'mfu': 0.025, 'data_wait_seconds': 1.5}
    assert clock.measure_speed(12) == {}
    spend(1.0, progress.STEPS)
    assert (last := clock.measure_speed(13))['seconds_per_step'] == 1.0 and last['data_wait_seconds'] == 0.0


NAMES = st.sampled_from([progress.STEPS, progress.WAITING_FOR_DATA, progress.EVALUATION])
# A block: its name, seconds before its inner blocks, inner blocks, seconds after them.
BLOCKS = st.recursive(
    st.tuples(NAMES, st.integers(0, 9), st.just([]), st.integers(0, 9)),
    lambda inner: st.tuples(NAMES, st.integers(0, 9), st.lists(inner, max_size=3), st.integers(0, 9)),
    max_leaves=8,
)


@given(st.lists(BLOCKS, max_size=4))
def test_each_moment_belongs_to_the_innermost_block(blocks):
    now, expected = [0.0], {progress.OTHER_ACTIVITIES: 0.0}
    timeline = progress.ActivityTimer(lambda: now[0])

    def run(block):
        name, before, inner, after = block
        expected[name] = expected.get(name, 0.0) + before + after
        with timeline.measure_activity(name):
            now[0] += before
            for child in inner:
                run(child)
            now[0] += after

    for block in blocks:
        run(block)
    now[0] += 1.0
    expected[progress.OTHER_ACTIVITIES] += 1.0
    seconds = timeline.get_seconds_by_activity()
    assert seconds == pytest.approx(expected) and sum(seconds.values()) == pytest.approx(now[0])
