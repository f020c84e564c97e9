"""Trains a subset of the parameters; the others are frozen, without gradients and optimizer state.

The parameters are split into two nested dicts, trained and frozen parameters. A step differentiates the loss only with
respect to the trained ones, and the optimizer receives only these: its state, its transformations per layer and its
shardings are those of a model that has only the trained parameters.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import optax
from flax import traverse_util

from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.dense import LORA_IN, LORA_OUT
from remixer_t5x.optim.optimizer import Optimizer, as_optimizer

Tree = Any
LORA_MATRICES = f'/({LORA_IN}|{LORA_OUT})$'


def only(optimizer: Any, trainable: str | None = None, lora: str | None = None) -> Optimizer:
    """Restricts `optimizer` to the parameters whose names match the regular expression `trainable`.

    If `trainable` is None, all parameters are trained; if `lora` is set (`lora.with_adapters`), only LoRA's matrices.

    Raises:
        UserError: `trainable` is not a regular expression, or (once the parameters are known) it matches no name.
    """
    optimizer = as_optimizer(optimizer)
    pattern = LORA_MATRICES if trainable is None and lora is not None else trainable
    if pattern is None:
        return optimizer
    compile_pattern(pattern)

    def make(logical_axes: Any) -> optax.GradientTransformation:
        inner = optimizer.make(split(logical_axes, pattern)[0])

        def init(params: Any) -> Any:
            return inner.init(split(params, pattern)[0])

        def update(gradients: Any, state: Any, params: Any) -> Any:
            return inner.update(gradients, state, split(params, pattern)[0])

        return optax.GradientTransformation(init, update)

    average = optimizer.evaluated

    def evaluated(state: Any, params: Any) -> Any:
        trained, frozen = split(params, pattern)
        return join(average(state, trained), frozen) if average else params

    return dataclasses.replace(optimizer, make=make, evaluated=average and evaluated, trainable=pattern)


def compile_pattern(trainable: str) -> re.Pattern[str]:
    """Compiles a regular expression. Raises UserError if it is invalid."""
    try:
        return re.compile(trainable)
    except (re.error, TypeError) as error:
        raise UserError(
            f"TRAINABLE must be a regular expression, as in 'encoder/.*/kernel', got {trainable!r} ({error}); "
            'type --gin.TRAINABLE=remixer'
        ) from error


def split(params: Tree, trainable: str | None) -> tuple[Tree, Tree]:
    """Splits nested dicts into (trained, frozen) by the names of their leaves; None trains all parameters.

    Raises UserError if no name matches the regular expression.
    """
    if trainable is None:
        return params, {}
    pattern, flat = compile_pattern(trainable), traverse_util.flatten_dict(params, sep='/')
    trained = {name: leaf for name, leaf in flat.items() if pattern.search(name)}
    if not trained:
        raise UserError(
            f'TRAINABLE must match the name of a parameter, got {trainable!r}; type a part of one, such as '
            f'{next(iter(flat))}'
        )
    frozen = {name: leaf for name, leaf in flat.items() if name not in trained}
    return traverse_util.unflatten_dict(trained, sep='/'), traverse_util.unflatten_dict(frozen, sep='/')


def join(trained: Tree, frozen: Tree) -> Tree:
    """Merges the nested dicts that `split` returns."""
    if isinstance(frozen, Mapping) and not frozen:
        return trained
    both = trained.keys() & frozen.keys()
    return {**trained, **frozen, **{name: join(trained[name], frozen[name]) for name in both}}
