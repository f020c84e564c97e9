"""Schedules against their formulas, evaluated in NumPy."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_t5x.optim import schedules


@pytest.mark.parametrize('step', [0, 1, 9_999, 10_000, 10_001, 1_000_000])
def test_rsqrt_is_t5s(step):
    assert float(schedules.rsqrt()(step)) == pytest.approx(1 / math.sqrt(max(step, 10_000)), rel=1e-6)


def test_the_length_of_the_constant_part_leaves_the_rate_alone():
    schedule = schedules.rsqrt(peak=0.02, constant_steps=50)
    assert [float(schedule(step)) for step in (0, 50, 200)] == pytest.approx([0.02, 0.02, 0.01])


def test_rsqrt_warms_up_in_a_line_to_the_same_rate():
    schedule = schedules.rsqrt(warmup_steps=50)
    assert [float(schedule(step)) for step in (0, 25, 50, 9_999)] == pytest.approx([0, 0.005, 0.01, 0.01])
    assert float(schedule(40_000)) == pytest.approx(0.005)


@settings(deadline=None)
@given(
    step=st.integers(0, 2_000),
    warmup=st.integers(1, 500),
    rest=st.integers(1, 1_000),
    final=st.floats(0.0, 0.1),
)
def test_cosine_is_a_ramp_and_half_a_cosine(step, warmup, rest, final):
    peak, total = 0.5, warmup + rest
    done = min(1.0, max(0.0, (step - warmup) / rest))
    ramp = peak * step / warmup
    cosine = final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
    expected = ramp if step < warmup else cosine
    assert float(schedules.cosine(peak, warmup, total, final)(step)) == pytest.approx(expected, abs=2e-6)


@settings(deadline=None, max_examples=30)
@given(step=st.integers(0, 2_000), warmup=st.integers(0, 500), rest=st.integers(10, 1_000), share=st.floats(0.2, 1.0))
def test_linear_and_wsd_are_their_formulas(step, warmup, rest, share):
    peak, final, start, total = 0.5, 0.05, 0.1, warmup + rest
    ramp = start + (peak - start) * step / max(warmup, 1)
    done = min(1.0, max(0.0, (step - warmup) / rest))
    expected = ramp if step < warmup else peak + (final - peak) * done
    assert float(schedules.linear(peak, warmup, total, final, start)(step)) == pytest.approx(expected, abs=2e-6)
    fall = min(round(share * total), rest)
    fallen = math.sqrt(min(1.0, max(0.0, (step - (total - fall)) / fall)))
    expected = ramp if step < warmup else peak + (final - peak) * fallen
    assert float(schedules.wsd(peak, warmup, total, fall / total, final, start)(step)) == pytest.approx(
        expected, abs=2e-6
    )


def test_a_constant_rate_may_warm_up():
    assert [float(schedules.constant(0.5, 4)(step)) for step in (0, 2, 4, 100)] == [0.0, 0.25, 0.5, 0.5]


def test_a_fall_longer_than_the_run_is_refused():
    with pytest.raises(UserError, match='DECAY_SHARE must be from 0.01 to 0.5 .* got 0.6; type --gin.DECAY_SHARE=0.5'):
        schedules.wsd(1.0, 50, 100, decay_share=0.6)


def test_cosine_warmup_starts_where_told():
    schedule = schedules.cosine(2e-2, 100, 1_000, final=1e-5, warmup_start=1e-2)
    assert [float(schedule(step)) for step in (0, 50, 100, 1_000)] == pytest.approx([1e-2, 1.5e-2, 2e-2, 1e-5])


@pytest.mark.parametrize('total', [1, 20, 10_000])
def test_cosine_warms_up_for_a_share_of_the_run_where_no_number_is_given(total):
    chosen, wanted = schedules.cosine(0.02, None, total), schedules.cosine(0.02, total // 20, total)
    assert [float(chosen(step)) for step in (0, 3, total)] == [float(wanted(step)) for step in (0, 3, total)]


@pytest.mark.parametrize(
    'schedule',
    [
        schedules.constant(0.1),
        schedules.rsqrt(),
        schedules.cosine(1.0, 10, 20),
        schedules.linear(1.0, 10, 20),
        schedules.wsd(1.0, 10, 20),
    ],
)
def test_rates_are_float32_scalars_under_jit(schedule):
    rate = jax.jit(schedule)(np.int32(3))
    assert rate.shape == () and rate.dtype == np.float32
    np.testing.assert_allclose(rate, schedule(3), rtol=1e-6)


def test_a_number_is_a_constant_schedule_and_nothing_else_passes():
    assert float(schedules.as_schedule(0.25)(7)) == 0.25
    with pytest.raises(UserError, match='learning_rate must be'):
        schedules.as_schedule('0.1')


def test_a_run_shorter_than_its_warmup_is_refused():
    with pytest.raises(UserError, match='WARMUP_STEPS must be .* got 100; type --gin.WARMUP_STEPS=5'):
        schedules.cosine(1.0, 100, 100)
