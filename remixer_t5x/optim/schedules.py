"""Defines learning rate schedules, which are functions that map a step to a float32 learning rate.

Step 0 is the first optimizer update. In gin, bind a schedule to the learning rate of an optimizer:
`optimizer.adafactor.learning_rate = @schedules.rsqrt()`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from remixer_t5x import ranges
from remixer_t5x.errors import UserError

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


@ranges.validate_arguments
def constant(value: ranges.Positive, warmup_steps: ranges.NonNegativeInt = 0) -> Schedule:
    """Creates a schedule with the constant learning rate `value` after a linear warmup from 0 over `warmup_steps`."""
    if not warmup_steps:
        return _as_float32(optax.constant_schedule(value))
    return _as_float32(optax.warmup_constant_schedule(0.0, value, warmup_steps))


@ranges.validate_arguments
def rsqrt(
    peak: ranges.Positive = 0.01, constant_steps: ranges.Count = 10_000, warmup_steps: ranges.NonNegativeInt = 0
) -> Schedule:
    """Creates T5's inverse square root schedule (Raffel et al. 2019, section 3.1.2).

    The learning rate is `peak` for the first `constant_steps` steps, and `peak * sqrt(constant_steps / step)` for later
    steps. During the first `warmup_steps` steps, the rate is multiplied by a linear ramp from 0, as in T5X's
    `linear_warmup`.
    """
    base = peak * math.sqrt(constant_steps)

    def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
        decayed = base * jax.lax.rsqrt(jnp.maximum(step, constant_steps).astype(jnp.float32))
        return decayed * jnp.minimum(1.0, step / warmup_steps) if warmup_steps else decayed

    return _as_float32(learning_rate)


# Length of the default warmup of schedules with a fixed number of steps, as a fraction of all steps.
WARMUP_SHARE = 0.05


@ranges.validate_arguments
def cosine(
    peak: ranges.Positive,
    warmup_steps: ranges.NonNegativeInt | None,
    total_steps: ranges.Count,
    final: ranges.NonNegative = 0.0,
    warmup_start: ranges.Fraction = 0.0,
) -> Schedule:
    """Creates a schedule with a linear warmup from `warmup_start * peak` to `peak` and a cosine decay to `final`.

    The decay ends at step `total_steps`, which includes the warmup; later steps use `final`. If `warmup_steps` is None,
    the warmup takes the fraction `WARMUP_SHARE` of all steps.
    """
    warmup_steps = _resolve_warmup_steps(warmup_steps, total_steps)
    return _as_float32(optax.warmup_cosine_decay_schedule(warmup_start * peak, peak, warmup_steps, total_steps, final))


@ranges.validate_arguments
def linear(
    peak: ranges.Positive,
    warmup_steps: ranges.NonNegativeInt | None,
    total_steps: ranges.Count,
    final: ranges.NonNegative = 0.0,
    warmup_start: ranges.Fraction = 0.0,
) -> Schedule:
    """Creates a schedule with a linear warmup to `peak` and a linear decay to `final` at step `total_steps`.

    The warmup starts at `warmup_start * peak`. If `warmup_steps` is None, the warmup is as long as in `cosine`.
    """
    warmup_steps = _resolve_warmup_steps(warmup_steps, total_steps)
    warmup = optax.linear_schedule(warmup_start * peak, peak, warmup_steps)
    decay = optax.linear_schedule(peak, final, total_steps - warmup_steps)
    return _as_float32(optax.join_schedules([warmup, decay], [warmup_steps]) if warmup_steps else decay)


@ranges.validate_arguments
def wsd(
    peak: ranges.Positive,
    warmup_steps: ranges.NonNegativeInt | None,
    total_steps: ranges.Count,
    decay_share: ranges.Fraction = 0.2,
    final: ranges.NonNegative = 0.0,
    warmup_start: ranges.Fraction = 0.0,
) -> Schedule:
    """Creates a warmup-stable-decay schedule: warmup from `warmup_start * peak`, constant `peak`, decay to `final`.

    Over the last fraction `decay_share` of `total_steps`, the rate decays as 1 - sqrt(x) for x from 0 to 1 (Haegele et
    al. 2024, arXiv:2405.18392, section 3). A run can resume from a checkpoint saved before the decay with the same
    warmup and any larger `total_steps`. If `warmup_steps` is None, the warmup is as long as in `cosine`.
    """
    warmup_steps = _resolve_warmup_steps(warmup_steps, total_steps)
    decay_steps = round(decay_share * total_steps)
    if not 1 <= decay_steps <= total_steps - warmup_steps:
        least, most = 1 / total_steps, 1 - warmup_steps / total_steps
        raise UserError(
            f'DECAY_SHARE must be from {least:.2g} to {most:.2g} for {total_steps} steps with {warmup_steps} warmup '
            f'steps, got {decay_share}; pass --gin.DECAY_SHARE={most:.2g}'
        )

    def learning_rate(step: jax.typing.ArrayLike) -> jax.Array:
        ramp = jnp.minimum(1.0, step / warmup_steps) if warmup_steps else 1.0
        decayed = jnp.sqrt(jnp.clip((step - (total_steps - decay_steps)) / decay_steps, 0.0, 1.0))
        start = warmup_start * peak
        return start + (peak - start) * ramp - (peak - final) * decayed

    return _as_float32(learning_rate)


@ranges.validate_arguments
def as_schedule(learning_rate: ranges.Positive | Schedule) -> Schedule:
    """Converts a number to a constant schedule; returns a schedule unchanged."""
    return learning_rate if callable(learning_rate) else constant(learning_rate)


def _as_float32(schedule: Schedule) -> Schedule:
    return lambda step: jnp.asarray(schedule(step), jnp.float32)


def _resolve_warmup_steps(warmup_steps: int | None, total_steps: int) -> int:
    if warmup_steps is None:
        return int(WARMUP_SHARE * total_steps)
    if total_steps <= warmup_steps:
        raise UserError(
            f'WARMUP_STEPS must be less than the {total_steps} steps of the schedule, got {warmup_steps}; '
            f'pass --gin.WARMUP_STEPS={total_steps // 20}, or train for more steps'
        )
    return warmup_steps
