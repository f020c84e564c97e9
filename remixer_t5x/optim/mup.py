"""Implements maximal update parametrization (muP), with which a learning rate can be transferred across widths.

muP was proposed by Yang et al. (2022, arXiv:2203.03466). Let m be the width divided by a base width. The initial values
and learning rates of the standard parametrization are multiplied by factors that depend on a parameter's logical axes:

    parameter                         initial std      Adam's learning rate
    features -> features              1 (fan-in)       1 / m
    features -> outputs, vocabulary,  m ** -0.5        1 / m
      positions of a generated MLP
    others: embeddings, norms,        1                1
      biases, position weights

The factors are those in table 3 of the paper. The initial values of T5's position bias are scaled so that their
variance does not depend on the width. For optimizers that multiply updates by the RMS of a parameter, the learning rate
factor is divided by the ratio by which this RMS changes with the width. For a tied output projection, the logits are
scaled instead (`base_embed_dim` of the models).

`EMBED_DIM`, hidden widths and numbers of heads must be scaled in proportion. Head widths and hidden widths along
the tokens (`token_mlp` in `axes`) must stay constant, so that attention needs no other scale. The initial values of
matrices with fixed standard deviations, as in BERT and GPT-2, do not follow the table.
"""

import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from remixer_t5x import axes, ranges
from remixer_t5x.devices.partition import is_boxed
from remixer_t5x.errors import UserError
from remixer_t5x.optim.optimizer import Optimizer, as_optimizer

_FEATURE_AXES = {axes.EMBED, axes.MLP, axes.JOINED_KV}


@ranges.validate_arguments
def scale_by_width(optimizer: Any, width: ranges.Count, base_width: ranges.Count | None = None) -> Optimizer:
    """Scales learning rates and initial values, so that a learning rate tuned at `base_width` can be used at `width`.

    Args:
        base_width: the width at which the learning rate was tuned; None returns `optimizer` unchanged.

    Raises:
        UserError: the optimizer does not support a learning rate factor for each parameter.
    """
    optimizer = as_optimizer(optimizer)
    if base_width is None:
        return optimizer
    if not optimizer.supports_mup:
        raise UserError(
            'MUP_BASE_WIDTH requires an optimizer that supports muP (`Optimizer.supports_mup`); '
            'pass, for example, --gin_file=optimizers/adamw_rms.gin'
        )
    ratio = width / base_width

    def make_gradient_transformation(logical_axes: Any) -> optax.GradientTransformation:
        factors = jax.tree.map(lambda spec: _compute_rate_factor(spec, ratio, optimizer.relative), logical_axes)
        return optimizer.make(logical_axes, factors)

    def compute_initial_factors(boxed: Any) -> Any:
        def compute_factor(path: Any, box: Any) -> float:
            if not is_boxed(box):
                name = jax.tree_util.keystr(path, simple=True, separator='/')
                raise UserError(
                    f'MUP_BASE_WIDTH requires parameters with logical axes, but {name} has none; use '
                    'nn.with_logical_partitioning'
                )
            return _compute_initial_value_factor(box.names, box.value.shape, ratio)

        return jax.tree_util.tree_map_with_path(compute_factor, boxed, is_leaf=is_boxed)

    return dataclasses.replace(optimizer, make=make_gradient_transformation, initial=compute_initial_factors)


def _compute_initial_value_factor(names: tuple[str | None, ...], shape: tuple[int, ...], ratio: float) -> float:
    if names[-2:] == (axes.HEADS, axes.RELPOS_BUCKETS):
        heads, buckets = shape[-2:]
        return ((heads + buckets) / (heads / ratio + buckets)) ** 0.5
    return ratio**-0.5 if classify_parameter(PartitionSpec(*names)) == 'output' else 1.0


def _compute_rate_factor(spec: PartitionSpec, ratio: float, relative: bool) -> float:
    kind = classify_parameter(spec)
    if kind == 'other':
        return 1.0
    # The RMS of hidden matrices is proportional to 1 / sqrt(m), and the RMS of output matrices to 1 / m.
    rms = {'hidden': ratio**-0.5, 'output': 1 / ratio}[kind]
    return 1 / ratio / (rms if relative else 1.0)


def classify_parameter(spec: PartitionSpec) -> str:
    """Returns the muP class of a parameter with the logical axes `spec`.

    'hidden': matrices from features to features; 'output': other matrices whose input axis is a feature axis;
    'other': all other parameters.
    """
    names = tuple(spec)
    if len(names) < 2 or names[-2] not in _FEATURE_AXES:
        return 'other'
    return 'hidden' if names[-1] in _FEATURE_AXES else 'output'
