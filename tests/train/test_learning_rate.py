"""What a run says about its learning rate before the first step."""

import optax
import pytest

from remixer_t5x.optim import optimizer, schedules
from remixer_t5x.train import learning_rate


def said(made, steps=100):
    return list(learning_rate.notes(made, steps))


def test_start_peak_and_end_are_the_schedule_s():
    schedule = schedules.cosine(0.02, 10, 100, final=1e-5, warmup_start=0.01)
    (line,) = said(optimizer.adamw_rms(schedule))
    assert line == f'learning rate: 0.01 at step 1, 0.02 at step 11, {float(schedule(99)):.3g} at step 100'
    assert said(optimizer.adafactor(0.001)) == ['learning rate: 0.001']
    # T5's own, which falls after 10,000 steps.
    (line,) = said(optimizer.adafactor(schedules.rsqrt()), 40_000)
    assert line == 'learning rate: 0.01 at step 1, 0.005 at step 40,000'


@pytest.mark.parametrize('make', [optimizer.adafactor, optimizer.adamw_rms])
def test_a_rate_far_above_published_ones_warns(make):
    too_high = schedules.rsqrt(0.14)
    assert [line.startswith('warning: the learning rate reaches 0.14. ') for line in said(make(too_high))] == [0, 1]
    assert len(said(make(schedules.rsqrt()))) == len(said(make(0.02))) == 1


def test_no_warning_where_a_safe_rate_is_not_known():
    assert len(said(optimizer.adafactor(1.0, multiply_by_parameter_scale=False))) == 1
    assert len(said(optimizer.adamw(1.0))) == 1
    assert said(optimizer.as_optimizer(optax.sgd(10.0))) == []
