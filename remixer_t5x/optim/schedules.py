"""Learning rate schedules: functions from the step to a float32 learning rate.

Steps count optimizer updates; the first update is step 0. Every function here returns such a function, so that gin can
pass it: `optimizer.adafactor.learning_rate = @schedules.rsqrt()`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from remixer_t5x import ranges
from remixer_t5x.errors import UserError

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


@ranges.checked
def constant(value: ranges.Positive, warmup_steps: ranges.Whole = 0) -> Schedule:
    """`value` at every step, after a line from 0 over `warmup_steps`."""
    if not warmup_steps:
        return _float32(optax.constant_schedule(value))
    return _float32(optax.warmup_constant_schedule(0.0, value, warmup_steps))


@ranges.checked
def rsqrt(
    peak: ranges.Positive = 0.01, constant_steps: ranges.Count = 10_000, warmup_steps: ranges.Whole = 0
) -> Schedule:
    """T5's inverse square root (Raffel et al. 2019, section 3.1.2): `peak` for the first `constant_steps`, then
    `peak * sqrt(constant_steps / step)`.

    The defaults are T5's `1 / sqrt(max(step, 10,000))`. The first `warmup_steps` raise the rate from 0 in a line, as
    T5X's `linear_warmup` does; T5 has none.
    """
    base = peak * math.sqrt(constant_steps)

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        decayed = base * jax.lax.rsqrt(jnp.maximum(step, constant_steps).astype(jnp.float32))
        return decayed * jnp.minimum(1.0, step / warmup_steps) if warmup_steps else decayed

    return _float32(rate)


# The share of all steps that warms up where no number is given: a run of any length has some warmup, and ends low.
WARMUP_SHARE = 0.05


@ranges.checked
def cosine(
    peak: ranges.Positive,
    warmup_steps: ranges.Whole | None,
    total_steps: ranges.Count,
    final: ranges.NonNegative = 0.0,
    warmup_start: ranges.NonNegative = 0.0,
) -> Schedule:
    """A line from `warmup_start` to `peak` over `warmup_steps`, then half a cosine down to `final` at
    `total_steps`.

    `peak`, `final` and `warmup_start` are learning rates; `total_steps` includes the warmup, and after it the
    rate stays at `final`. `warmup_steps` None is `WARMUP_SHARE` of `total_steps`.
    """
    if warmup_steps is None:
        warmup_steps = int(WARMUP_SHARE * total_steps)
    _check_decay(warmup_steps, total_steps)
    return _float32(optax.warmup_cosine_decay_schedule(warmup_start, peak, warmup_steps, total_steps, final))


@ranges.checked
def linear(
    peak: ranges.Positive,
    warmup_steps: ranges.Whole,
    total_steps: ranges.Count,
    final: ranges.NonNegative = 0.0,
    warmup_start: ranges.NonNegative = 0.0,
) -> Schedule:
    """As `cosine`, with a line down to `final` in place of half a cosine."""
    _check_decay(warmup_steps, total_steps)
    ramp = optax.linear_schedule(warmup_start, peak, warmup_steps)
    fall = optax.linear_schedule(peak, final, total_steps - warmup_steps)
    return _float32(optax.join_schedules([ramp, fall], [warmup_steps]) if warmup_steps else fall)


@ranges.checked
def wsd(
    peak: ranges.Positive,
    warmup_steps: ranges.Whole,
    total_steps: ranges.Count,
    decay_share: ranges.Share = 0.2,
    final: ranges.NonNegative = 0.0,
    warmup_start: ranges.NonNegative = 0.0,
) -> Schedule:
    """Warmup, stable, decay: a line from `warmup_start` to `peak` over `warmup_steps`, `peak`, and a fall to `final` in
    the last `decay_share` of `total_steps`, by 1 - sqrt (Haegele et al. 2024, arXiv:2405.18392, section 3).

    A checkpoint from before the fall continues with any larger `total_steps`, as one longer run.
    """
    _check_decay(warmup_steps, total_steps)
    decay_steps = round(decay_share * total_steps)
    if not 1 <= decay_steps <= total_steps - warmup_steps:
        raise UserError(
            f'schedule: decay_share = {decay_share} is {decay_steps} of {total_steps} steps, after {warmup_steps} of '
            f'warmup; give DECAY_SHARE a value from {1 / total_steps:.2g} to {1 - warmup_steps / total_steps:.2g}'
        )

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        ramp = jnp.minimum(1.0, step / warmup_steps) if warmup_steps else 1.0
        fallen = jnp.sqrt(jnp.clip((step - (total_steps - decay_steps)) / decay_steps, 0.0, 1.0))
        return warmup_start + (peak - warmup_start) * ramp - (peak - final) * fallen

    return _float32(rate)


@ranges.checked
def as_schedule(learning_rate: ranges.Positive | Schedule) -> Schedule:
    """Returns a schedule: a number becomes a constant one."""
    return learning_rate if callable(learning_rate) else constant(learning_rate)


def _float32(schedule: Schedule) -> Schedule:
    return lambda step: jnp.asarray(schedule(step), jnp.float32)


def _check_decay(warmup_steps: int, total_steps: int) -> None:
    if total_steps <= warmup_steps:
        raise UserError(
            f'schedule: total_steps = {total_steps} leaves no step after warmup_steps = {warmup_steps}; '
            f'lower WARMUP_STEPS below {max(total_steps, 1)} or raise TRAIN_STEPS'
        )
