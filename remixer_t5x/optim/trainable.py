"""Trains a subset of the parameters, without gradients or optimizer state for the frozen parameters.

Gradients are computed only for the trained parameters, and the optimizer receives only these, as if the model had no
other parameters.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import optax
from flax import traverse_util

from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.dense import LORA_IN, LORA_OUT
from remixer_t5x.models.lora import check_regex
from remixer_t5x.optim.optimizer import Optimizer, as_optimizer

Tree = Any
LORA_PATTERN = f'/({LORA_IN}|{LORA_OUT})$'


def restrict_to_trainable(
    optimizer: Any,
    trainable: str | None = None,
    lora: str | None = None,
    model: Any = None,
    fresh_parameters: str | None = None,
    checkpoint_map: Mapping[str, str | None] | None = None,
) -> Optimizer:
    """Restricts `optimizer` to the parameters whose names match the regular expression `trainable`.

    If `trainable` is None and `lora` is set (`lora.with_adapters`), only the LoRA matrices and the parameters with
    random initial values are trained: the head of `model` and, as in `train.settings.Folder`, parameters that contain
    `fresh_parameters` or that `checkpoint_map` maps to None. If both are None, all parameters are trained. Raises
    UserError if the expression is invalid or matches no parameter.
    """
    optimizer, pattern, setting = as_optimizer(optimizer), trainable, 'TRAINABLE'
    if trainable is None and lora is not None:
        heads = [f'^{head}/' for head in getattr(model, 'fresh_parameters', ())]
        fresh = [re.escape(fresh_parameters)] if fresh_parameters else []
        mapped = [f'^({names})$' for names, source in (checkpoint_map or {}).items() if source is None]
        pattern, setting = '|'.join([LORA_PATTERN, *heads, *fresh, *mapped]), 'INITIAL_CHECKPOINT_MAP'
    if pattern is None:
        return optimizer
    check_regex(setting, pattern, 'encoder/.*/kernel')

    def make_gradient_transformation(*axes_and_factors: Any) -> optax.GradientTransformation:
        trained = [split_params(tree, pattern)[0] for tree in axes_and_factors]
        inner = optax.with_extra_args_support(optimizer.make(*trained))

        def init(params: Any) -> Any:
            return inner.init(split_params(params, pattern)[0])

        def update(gradients: Any, state: Any, params: Any, **extra_args: Any) -> Any:
            return inner.update(gradients, state, split_params(params, pattern)[0], **extra_args)

        return optax.GradientTransformationExtraArgs(init, update)

    average = optimizer.evaluated

    def get_averaged_params(state: Any, params: Any) -> Any:
        trained, frozen = split_params(params, pattern)
        return join_params(average(state, trained), frozen) if average else params

    return dataclasses.replace(
        optimizer, make=make_gradient_transformation, evaluated=average and get_averaged_params, trainable=pattern
    )


def split_params(params: Tree, trainable: str | None) -> tuple[Tree, Tree]:
    """Splits parameters into trained and frozen ones; all parameters are trained if `trainable` is None.

    Raises UserError if no parameter name matches the regular expression `trainable`.
    """
    if trainable is None:
        return params, {}
    pattern, flat = re.compile(trainable), traverse_util.flatten_dict(params, sep='/')
    trained = {name: leaf for name, leaf in flat.items() if pattern.search(name)}
    if not trained:
        raise UserError(
            f'TRAINABLE must match the name of a parameter, such as {next(iter(flat))}, got {trainable!r}; '
            'set it to part of a parameter name'
        )
    frozen = {name: leaf for name, leaf in flat.items() if name not in trained}
    return traverse_util.unflatten_dict(trained, sep='/'), traverse_util.unflatten_dict(frozen, sep='/')


def join_params(trained: Tree, frozen: Tree) -> Tree:
    """Merges trained and frozen parameters; the inverse of `split_params`."""
    if isinstance(frozen, Mapping) and not frozen:
        return trained
    shared = trained.keys() & frozen.keys()
    return {**trained, **frozen, **{name: join_params(trained[name], frozen[name]) for name in shared}}
