"""Averages parameters with exponential moving averages (EMA) or schedule-free optimizers.

The averaged parameters are evaluated instead of the latest parameters. The averages belong to the optimizer state, so
they are saved in checkpoints, and skipped steps do not change them.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import schedule_free, schedule_free_eval_params

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.optim.optimizer import Optimizer, as_optimizer, build_optimizer_with_decay
from remixer_t5x.optim.schedules import Schedule, as_schedule

AVERAGE = 'average'
# Name prefixes of parameters, averages and schedule-free iterates in a saved train state, and the name of b1.
PARAMS, _AVERAGES, _ITERATES, _B1 = 'params/', f'opt_state/{AVERAGE}/', 'opt_state/z/', 'opt_state/b1'


def average_params(optimizer: Any, decay: float | None) -> Optimizer:
    """Adds a float32 exponential moving average (EMA) of the parameters, unless `decay` is None.

    After t steps, the decay is min(decay, (1 + t) / (10 + t)), which reduces the bias towards the initial parameters.
    TensorFlow's ExponentialMovingAverage uses the same decay.
    """
    optimizer = as_optimizer(optimizer)
    if decay is None:
        return optimizer
    ranges.check_setting('EMA_DECAY', decay, ranges.OpenFraction | None)
    if optimizer.evaluated is not None:
        raise UserError(
            f'EMA_DECAY must be None for an optimizer that already averages parameters, got {decay}; '
            'pass --gin.EMA_DECAY=None'
        )

    def make_gradient_transformation(*axes_and_factors):
        inner = optax.with_extra_args_support(optimizer.make(*axes_and_factors))

        def init(params):
            copies = jax.tree.map(jnp.copy, params)
            return {AVERAGE: copies, 'count': jnp.zeros((), jnp.int32), 'inner': inner.init(params)}

        def update(updates, state, params, **extra_args):
            updates, inner_state = inner.update(updates, state['inner'], params, **extra_args)
            count = state['count'] + 1
            share = 1 - jnp.minimum(decay, (1 + count) / (10 + count))
            average = jax.tree.map(
                lambda old, new: old + share * (new - old), state[AVERAGE], optax.apply_updates(params, updates)
            )
            return updates, {AVERAGE: average, 'count': count, 'inner': inner_state}

        return optax.GradientTransformationExtraArgs(init, update)

    return dataclasses.replace(
        optimizer, make=make_gradient_transformation, evaluated=lambda state, params: state[AVERAGE]
    )


@ranges.validate_arguments
def schedule_free_adamw(
    learning_rate: ranges.Positive | Schedule,
    b1: ranges.OpenFraction = 0.9,
    b2: ranges.Rate = 0.999,
    epsilon: ranges.Positive = 1e-8,
    weight_decay: ranges.NonNegative = 0.0,
    max_grad_norm: ranges.Positive | None = 1.0,
) -> Optimizer:
    """Creates a schedule-free AdamW optimizer, which needs no learning rate decay.

    The method is described by Defazio et al. (2024, arXiv:2405.15682). Gradients are computed at y = (1 - b1) z + b1 x,
    where z denotes the iterates of AdamW without momentum, and x is their average, weighted by the square of the
    largest learning rate so far. The parameters of the train state are y, the optimizer state contains z, and
    evaluation uses x. The learning rate should be constant after a warmup. `weight_decay` is computed at y and applied
    only to matrices.
    """
    schedule = as_schedule(learning_rate)
    rule = optax.scale_by_rms(decay=b2, eps=epsilon, eps_in_sqrt=False, bias_correction=True)
    iterates = build_optimizer_with_decay(lambda logical_axes: rule, schedule, weight_decay, max_grad_norm)

    def make_gradient_transformation(logical_axes):
        inner = schedule_free(iterates.make(logical_axes), schedule, b1=b1)
        return optax.GradientTransformation(inner.init, inner.update)

    return Optimizer(schedule, make_gradient_transformation, evaluated=schedule_free_eval_params)


def select_saved_arrays(params: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the names and shapes of the arrays in a saved train state that `compute_eval_params` requires.

    Args:
        params: maps names of parameters, such as `encoder/run_0/layer/...`, to arrays or shapes.
        names: names of all arrays in the saved state.
    """
    arrays = {}
    is_schedule_free = {_B1, 'opt_state/weight_sum'} <= set(names)
    for name, leaf in params.items():
        if _AVERAGES + name in names:
            arrays[_AVERAGES + name] = leaf
            continue
        arrays[PARAMS + name] = leaf
        if is_schedule_free and _ITERATES + name in names:
            arrays |= {_ITERATES + name: leaf, _B1: jax.ShapeDtypeStruct((), jnp.float32)}
    return arrays


def compute_eval_params(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the parameters to evaluate, computed from the arrays selected by `select_saved_arrays`."""
    params, averages, iterates = (
        {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        for prefix in (PARAMS, _AVERAGES, _ITERATES)
    )
    if iterates:
        average = jax.jit(lambda y, z, b1: jax.tree.map(lambda yi, zi: (yi - (1.0 - b1) * zi) / b1, y, z))
        averages = average({name: params[name] for name in iterates}, iterates, arrays[_B1])
    return params | averages
