"""Schedules against their formulas."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.errors import UserError
from remixer_t5x.optim import schedules


@pytest.mark.parametrize(
    ('schedule', 'rates'),
    [
        (schedules.constant(0.5, 4), {0: 0.0, 2: 0.25, 4: 0.5, 100: 0.5}),
        # T5's schedule.
        (schedules.rsqrt(), {0: 0.01, 9_999: 0.01, 10_000: 0.01, 40_000: 0.005, 1_000_000: 0.001}),
        (schedules.rsqrt(warmup_steps=50), {0: 0.0, 25: 0.005, 50: 0.01, 9_999: 0.01, 40_000: 0.005}),
        (schedules.cosine(2e-2, 100, 1_000, 1e-5, warmup_start=0.5), {0: 1e-2, 50: 1.5e-2}),
        # Without a number of warmup steps, 5% of the steps are warmup.
        (schedules.cosine(0.02, None, 200), {0: 0.0, 5: 0.01, 10: 0.02, 200: 0.0}),
        (schedules.cosine(0.02, None, 1), {0: 0.02, 1: 0.0}),
        (schedules.linear(0.02, None, 200), {0: 0.0, 5: 0.01, 10: 0.02, 105: 0.01, 200: 0.0}),
        (schedules.wsd(0.02, None, 200), {0: 0.0, 5: 0.01, 10: 0.02, 160: 0.02, 200: 0.0}),
    ],
)
def test_learning_rates_at_given_steps(schedule, rates):
    assert {step: float(schedule(step)) for step in rates} == pytest.approx(rates, rel=1e-5, abs=1e-9)


@settings(deadline=None)
@given(
    step=st.integers(0, 2_000),
    warmup=st.integers(1, 500),
    rest=st.integers(1, 1_000),
    final=st.floats(0.0, 0.1),
)
def test_cosine_follows_its_formula(step, warmup, rest, final):
    peak, total = 0.5, warmup + rest
    progress = min(1.0, max(0.0, (step - warmup) / rest))
    ramp = peak * step / warmup
    cosine = final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2
    expected = ramp if step < warmup else cosine
    assert float(schedules.cosine(peak, warmup, total, final)(step)) == pytest.approx(expected, abs=2e-6)


@settings(deadline=None, max_examples=30)
@given(step=st.integers(0, 2_000), warmup=st.integers(0, 500), rest=st.integers(10, 1_000), share=st.floats(0.2, 1.0))
def test_linear_and_wsd_follow_their_formulas(step, warmup, rest, share):
    peak, final, start, total = 0.5, 0.05, 0.1, warmup + rest
    ramp = start + (peak - start) * step / max(warmup, 1)
    progress = min(1.0, max(0.0, (step - warmup) / rest))
    expected = ramp if step < warmup else peak + (final - peak) * progress
    assert float(schedules.linear(peak, warmup, total, final, start / peak)(step)) == pytest.approx(expected, abs=2e-6)
    decay_steps = min(round(share * total), rest)
    decay = math.sqrt(min(1.0, max(0.0, (step - (total - decay_steps)) / decay_steps)))
    expected = ramp if step < warmup else peak + (final - peak) * decay
    assert float(schedules.wsd(peak, warmup, total, decay_steps / total, final, start / peak)(step)) == pytest.approx(
        expected, abs=2e-6
    )


def test_rates_are_float32_scalars_under_jit():
    decaying = [make(1.0, 10, 20) for make in (schedules.cosine, schedules.linear, schedules.wsd)]
    all_schedules = [schedules.constant(0.1), schedules.rsqrt(), *decaying]
    rates = jax.jit(lambda step: [schedule(step) for schedule in all_schedules])(np.int32(3))
    assert all(rate.shape == () and rate.dtype == np.float32 for rate in rates)
    np.testing.assert_allclose(rates, [schedule(3) for schedule in all_schedules], rtol=1e-6)


def test_numbers_are_constant_schedules_and_strings_are_rejected():
    assert float(schedules.as_schedule(0.25)(7)) == 0.25
    with pytest.raises(UserError, match='learning_rate must be'):
        schedules.as_schedule('0.1')


@pytest.mark.parametrize(
    ('make', 'message'),
    [
        (lambda: schedules.wsd(1.0, 50, 100, decay_share=0.6), 'DECAY_SHARE must be from 0.01 to 0.5 .* got 0.6; pass'),
        (lambda: schedules.cosine(1.0, 100, 100), 'WARMUP_STEPS must .* --gin.WARMUP_STEPS=5, or train for more steps'),
    ],
)
def test_phases_longer_than_the_run_are_rejected(make, message):
    with pytest.raises(UserError, match=message):
        make()
