"""Optimizers: Adafactor with T5's settings, AdamW scaled by parameter RMS, AdamW, and Lion.

The module `muon` defines Muon, and `parameter_averages` defines schedule-free AdamW.

All optimizers are chains of optax transformations. Transformations that depend on a whole parameter process each layer
separately (`layerwise_updates`), so that the update of a layer does not depend on whether it is stacked with other
layers. Elementwise and global transformations, such as clipping the gradient norm, process stacked parameters directly.

`momentum_dtype` is the dtype of the first moment, the running mean of gradients: 'bfloat16' halves its memory. Second
moments are always float32: a step changes them by a fraction of 1 - b2 = 0.001, which bfloat16 would round away.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from remixer_t5x import axes, ranges
from remixer_t5x.errors import UserError, to_one_line
from remixer_t5x.optim.layerwise_updates import apply_per_layer, scale_by_parameter_rms
from remixer_t5x.optim.schedules import Schedule, as_schedule

# Minimum parameter RMS for scaling the updates of Remixer's H and alpha and gMLP's W; docs/results/remixer.md shows its
# effect.
MIN_RMS_NEAR_ZERO = 0.2


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Factory of an optax transformation that may depend on the logical axes of the parameters.

    Attributes:
        learning_rate: function that maps the step (starting at 0) to the learning rate; None if unknown.
        make: function that creates the transformation from the logical axes of the parameters, a tree of PartitionSpec
            (`nn.get_partition_spec(boxed_params)`).
        evaluated: function that returns the averaged parameters to evaluate, computed from the transformation's state
            and the parameters; None if the optimizer computes no average. Commands that read a checkpoint do not
            create the optimizer; `parameter_averages.select_saved_arrays` finds the average by its name.
        relative: whether updates are multiplied by the RMS of their parameter.
        supports_mup: whether `make` accepts a second argument, a tree of factors by which updates are multiplied. The
            factors of `mup` are valid if the size of updates does not depend on that of the gradients, as in Adam.
        initial: function that maps boxed parameters to a tree of factors for their initial values; None leaves the
            initial values unchanged.
        trainable: regular expression for the names of the parameters to train; all other parameters are frozen
            (`trainable.restrict_to_trainable`). None trains all parameters.
    """

    learning_rate: Schedule | None
    make: Callable[..., optax.GradientTransformation]
    evaluated: Callable[[Any, Any], Any] | None = None
    relative: bool = False
    supports_mup: bool = False
    initial: Callable[[Any], Any] | None = None
    trainable: str | None = None


def as_optimizer(optimizer: Any) -> Optimizer:
    """Wraps an optax transformation in an `Optimizer`, without `apply_per_layer`; returns an `Optimizer` unchanged."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, optax.GradientTransformation):
        update = optax.with_extra_args_support(optimizer).update
        checked = optax.GradientTransformationExtraArgs(_report_errors(optimizer.init), _report_errors(update))
        state = None
        # A transformation whose `init` raises an error for an empty tree of parameters is not schedule-free.
        with contextlib.suppress(Exception):
            state = jax.eval_shape(optimizer.init, {})
        average = schedule_free_eval_params if _is_schedule_free(state) else None
        if average is None and any(map(_is_schedule_free, jax.tree.leaves(state, is_leaf=_is_schedule_free))):
            raise UserError(
                'OPTIMIZER must be the schedule-free optimizer itself, got a chain or wrapper around it, with which '
                'its averaged parameters would not be evaluated; pass the other transformations to '
                'optax.contrib.schedule_free, as in schedule_free(optax.chain(...), ...)'
            )
        return Optimizer(None, lambda logical_axes: checked, evaluated=average)
    advice = 'set OPTIMIZER = @optimizer.adafactor()'
    if callable(optimizer):
        advice = 'add () after its name'
    elif isinstance(optimizer, optax.MultiSteps):
        advice = 'pass optax.MultiSteps(...).gradient_transformation()'
    name = getattr(optimizer, '__name__', None) or repr(optimizer)
    raise UserError(
        'OPTIMIZER must be an optimizer such as @optimizer.adafactor() or an optax transformation such as '
        f'@optax.adamw() (in Python, optax.adamw(1e-3)), got {name:.80}; {advice}'
    )


def _is_schedule_free(state: Any) -> bool:
    return isinstance(state, ScheduleFreeState)


def _report_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Raises UserError if `init` or `update` of an optax transformation fails, such as that of `optax.lbfgs`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise UserError(
                'OPTIMIZER must compute updates from the gradients, the parameters and the loss, and support sharded '
                f'parameters, but it raised {type(error).__name__}: {to_one_line(str(error)):.200}; use another '
                'optimizer, such as @optax.adamw()'
            ) from error

    return call


@ranges.validate_arguments
def adafactor(
    learning_rate: ranges.Positive | Schedule,
    decay_rate: ranges.Rate = 0.8,
    clipping_threshold: ranges.Positive | None = 1.0,
    multiply_by_parameter_scale: bool = True,
    min_dim_size_to_factor: int = 128,
    epsilon1: float = 1e-30,
    epsilon2: float = 1e-3,
    min_rms_near_zero: float = MIN_RMS_NEAR_ZERO,
) -> Optimizer:
    """Creates an Adafactor optimizer (Shazeer and Stern 2018) with T5's settings: no momentum and no weight decay.

    The decay rate of the second moments is `1 - (step + 1) ** -decay_rate`. `epsilon1` is added to squared gradients,
    `epsilon2` is the minimum parameter RMS for `multiply_by_parameter_scale`, and `clipping_threshold` limits the RMS
    of a parameter's update before it is multiplied by the learning rate. The arguments have the same names as in T5X.

    Unlike in T5X, second moments are factored only if both dimensions of a layer's matrix are at least
    `min_dim_size_to_factor`. Parameters that may be initialized near zero (`layerwise_updates.find_params_near_zero`),
    which T5 does not have, use the minimum RMS `min_rms_near_zero`.
    """
    schedule = as_schedule(learning_rate)
    block_steps = [
        optax.scale_by_factored_rms(
            decay_rate=decay_rate, min_dim_size_to_factor=min_dim_size_to_factor, epsilon=epsilon1
        )
    ]
    if clipping_threshold is not None:
        block_steps.append(optax.clip_by_block_rms(clipping_threshold))

    def make_gradient_transformation(logical_axes, multipliers=None):
        steps = [apply_per_layer(optax.chain(*block_steps), logical_axes)]
        if multiply_by_parameter_scale:
            steps.append(scale_by_parameter_rms(logical_axes, epsilon2, min_rms_near_zero))
        steps += _scale_updates(multipliers)
        return optax.chain(*steps, optax.scale_by_learning_rate(schedule))

    return Optimizer(schedule, make_gradient_transformation, relative=multiply_by_parameter_scale, supports_mup=True)


@ranges.validate_arguments
def adamw_rms(
    learning_rate: ranges.Positive | Schedule,
    b1: ranges.Rate = 0.9,
    b2: ranges.Rate = 0.999,
    epsilon: ranges.Positive = 1e-6,
    min_rms: float = 1e-3,
    min_rms_near_zero: float = MIN_RMS_NEAR_ZERO,
    weight_decay: ranges.NonNegative = 0.0,
    max_grad_norm: ranges.Positive | None = 1.0,
    momentum_dtype: ranges.FloatDtype = 'float32',
) -> Optimizer:
    """Creates an AdamW optimizer that multiplies updates by max(parameter RMS, `min_rms`), as in nanoT5.

    The defaults are nanoT5's settings for T5.1.1-base (Nawrot 2023, arXiv:2309.02373). Gradients are first clipped to
    the global norm `max_grad_norm` (None disables clipping). `weight_decay` is decoupled, is multiplied only by the
    learning rate, and is applied only to matrices (`build_weight_decay_mask`). Parameters that may be
    initialized near zero (`layerwise_updates.find_params_near_zero`), which T5 does not have, use `min_rms_near_zero`
    instead of `min_rms`. `epsilon` is added after the bias correction, as in the Adam paper, whereas nanoT5 adds it
    before.
    """

    def build_update_rule(logical_axes):
        adam = optax.scale_by_adam(b1=b1, b2=b2, eps=epsilon, mu_dtype=jnp.dtype(momentum_dtype))
        return optax.chain(adam, scale_by_parameter_rms(logical_axes, min_rms, min_rms_near_zero))

    return build_optimizer_with_decay(
        build_update_rule, learning_rate, weight_decay, max_grad_norm, relative=True, supports_mup=True
    )


@ranges.validate_arguments
def adamw(
    learning_rate: ranges.Positive | Schedule,
    b1: ranges.Rate = 0.9,
    b2: ranges.Rate = 0.999,
    epsilon: ranges.Positive = 1e-8,
    weight_decay: ranges.NonNegative = 0.0,
    max_grad_norm: ranges.Positive | None = 1.0,
    momentum_dtype: ranges.FloatDtype = 'float32',
) -> Optimizer:
    """Creates an AdamW optimizer (Loshchilov and Hutter 2019).

    Gradient clipping and `weight_decay` work as in `adamw_rms`, but updates are not scaled by the parameter RMS.
    """
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=epsilon, mu_dtype=jnp.dtype(momentum_dtype))
    return build_optimizer_with_decay(
        lambda logical_axes: adam, learning_rate, weight_decay, max_grad_norm, supports_mup=True
    )


@ranges.validate_arguments
def lion(
    learning_rate: ranges.Positive | Schedule,
    b1: ranges.Rate = 0.9,
    b2: ranges.Rate = 0.99,
    weight_decay: ranges.NonNegative = 0.0,
    max_grad_norm: ranges.Positive | None = 1.0,
    momentum_dtype: ranges.FloatDtype = 'float32',
) -> Optimizer:
    """Creates a Lion optimizer (Chen et al. 2023), which changes every element by plus or minus the learning rate.

    The optimizer state contains one running mean of the gradients. The paper (arXiv:2302.06675) recommends a
    learning rate 3 to 10 times smaller than for AdamW, and a `weight_decay` larger by the same factor. Gradient
    clipping and `weight_decay` work as in `adamw_rms`.
    """
    rule = optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=jnp.dtype(momentum_dtype))
    return build_optimizer_with_decay(
        lambda logical_axes: rule, learning_rate, weight_decay, max_grad_norm, supports_mup=True
    )


def build_optimizer_with_decay(
    rule: Callable[[Any], optax.GradientTransformation],
    learning_rate: ranges.Positive | Schedule,
    weight_decay: ranges.NonNegative,
    max_grad_norm: ranges.Positive | None,
    relative: bool = False,
    supports_mup: bool = False,
) -> Optimizer:
    """Creates an optimizer that combines an update rule with gradient clipping and weight decay.

    Gradients are clipped to the global norm `max_grad_norm`, transformed by `rule(logical_axes)`, and multiplied by the
    factors of `mup`. Weight decay is then added to the updates of matrices, and the sum is multiplied by the learning
    rate, so muP does not change the weight decay.
    """
    schedule = as_schedule(learning_rate)

    def make_gradient_transformation(logical_axes, multipliers=None):
        steps = [optax.clip_by_global_norm(max_grad_norm)] if max_grad_norm is not None else []
        steps += [rule(logical_axes), *_scale_updates(multipliers)]
        if weight_decay:
            steps.append(optax.add_decayed_weights(weight_decay, mask=build_weight_decay_mask(logical_axes)))
        return optax.chain(*steps, optax.scale_by_learning_rate(schedule))

    return Optimizer(schedule, make_gradient_transformation, relative=relative, supports_mup=supports_mup)


def _scale_updates(factors: Any) -> list[optax.GradientTransformation]:
    """Returns a list with one transformation that multiplies updates by `factors`; empty if `factors` is None."""
    if factors is None:
        return []
    return [optax.stateless(lambda updates, params: jax.tree.map(lambda step, factor: factor * step, updates, factors))]


def build_weight_decay_mask(logical_axes: Any) -> Any:
    """Returns a tree of booleans, True for parameters with weight decay: all matrices.

    A vector for each layer, head or mechanism, such as a relative position bias, is not a matrix. A kernel that maps
    features to heads is a matrix.
    """

    def has_weight_decay(spec):
        stacking_axes = {axes.LAYERS, axes.HEADS, axes.MECHANISMS}
        return len([*itertools.dropwhile(stacking_axes.__contains__, spec)]) >= 2

    return jax.tree.map(has_weight_decay, logical_axes)
