"""Training some of the parameters: the others get no gradient and no optimizer state.

The parameters are cut into two nested dicts with the same paths, what is trained and what is frozen. A step
differentiates the loss in the first alone, and the optimizer never sees the second: its state, its transformations per
layer and its shardings are as if the model had only the trained parameters.
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
    """`optimizer` for the parameters in whose names the regular expression `trainable` is found; None trains all, or
    where `lora` adapts a model (`models.lora.adapted`) its matrices alone.

    Raises:
        UserError: it is not a regular expression, or (once the parameters are known) it is found in no name.
    """
    made = as_optimizer(optimizer)
    if trainable is None and lora is not None:
        trainable = LORA_MATRICES
    if trainable is None:
        return made
    chosen = trainable
    compile_pattern(chosen)

    def make(logical_axes: Any) -> optax.GradientTransformation:
        inner = made.make(split(logical_axes, chosen)[0])

        def init(params: Any) -> Any:
            return inner.init(split(params, chosen)[0])

        def update(gradients: Any, state: Any, params: Any) -> Any:
            return inner.update(gradients, state, split(params, chosen)[0])

        return optax.GradientTransformation(init, update)

    average = made.evaluated

    def evaluated(state: Any, params: Any) -> Any:
        trained, frozen = split(params, chosen)
        return join(average(state, trained), frozen) if average else params

    return dataclasses.replace(made, make=make, evaluated=average and evaluated, trainable=chosen)


def compile_pattern(trainable: str, setting: str = 'TRAINABLE') -> re.Pattern[str]:
    """The regular expression; raises UserError if it is not one."""
    try:
        return re.compile(trainable)
    except (re.error, TypeError) as error:
        raise UserError(
            f"{setting} is {trainable!r}, which is not a regular expression ({error}); it takes one such as 'remixer' "
            "or 'encoder/.*/kernel'"
        ) from error


def split(params: Tree, trainable: str | None) -> tuple[Tree, Tree]:
    """(trained, frozen): two nested dicts that share no path; with None everything is trained.

    Raises UserError if no parameter has the regular expression in its name.
    """
    if trainable is None:
        return params, {}
    found, flat = compile_pattern(trainable), traverse_util.flatten_dict(params, sep='/')
    trained = {name: leaf for name, leaf in flat.items() if found.search(name)}
    if not trained:
        raise UserError(
            f'TRAINABLE is {trainable!r}, which is found in the name of no parameter; names are like {next(iter(flat))}'
        )
    frozen = {name: leaf for name, leaf in flat.items() if name not in trained}
    return traverse_util.unflatten_dict(trained, sep='/'), traverse_util.unflatten_dict(frozen, sep='/')


def join(trained: Tree, frozen: Tree) -> Tree:
    """The nested dict that `split` has cut."""
    if isinstance(frozen, Mapping) and not frozen:
        return trained
    both = trained.keys() & frozen.keys()
    return {**trained, **frozen, **{name: join(trained[name], frozen[name]) for name in both}}
