"""Width transfer (muP, Yang et al. 2022, arXiv:2203.03466): one learning rate that is optimal at every width.

Let m be the width divided by a base width. By the axes of a parameter, relative to the standard parametrization:

    parameter                         initial std      Adam's learning rate
    features -> features              1 (fan-in)       1 / m
    features -> outputs, words,       m ** -0.5        1 / m
      positions of a generated MLP
    others: embeddings, norms,        1                1
      biases, position weights

The initial values of T5's position bias are scaled so that their variance does not depend on the width. These are the
rows of table 3 of the paper. For optimizers that multiply updates by the RMS of a parameter, the rates are divided by
the change of that RMS with the width. A tied output projection is also an embedding, so the logits are scaled instead
(`base_embed_dim` of the models). With m = 1 nothing changes, to the bit.

`EMBED_DIM`, hidden widths and numbers of heads must be scaled in proportion. Head widths, and widths along the tokens
(`token_mlp` in `axes`), must stay constant, so that attention needs no other scale.
"""

import dataclasses
from typing import Any

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec

from remixer_t5x import axes, ranges
from remixer_t5x.errors import UserError
from remixer_t5x.optim.optimizer import Optimizer, as_optimizer

_FEATURES = {axes.EMBED, axes.MLP, axes.JOINED_KV}
_STACKED = {axes.LAYERS, axes.MECHANISMS}


@ranges.checked
def scaled(optimizer: Any, width: ranges.Count, base_width: ranges.Count | None = None) -> Optimizer:
    """Scales the learning rate and the initial value of each parameter for the transfer from `base_width`.

    Args:
        optimizer: the optimizer, with the learning rate of the base width.
        width: width of the residual stream.
        base_width: the width at which nothing changes; None returns `optimizer` unchanged.

    Raises:
        UserError: the optimizer does not support it.
    """
    optimizer = as_optimizer(optimizer)
    if base_width is None:
        return optimizer
    if not optimizer.takes_multipliers:
        raise UserError(
            'MUP_BASE_WIDTH requires adamw, adamw_rms, lion or adafactor; add --gin_file=optimizers/adamw_rms.gin'
        )
    ratio = width / base_width

    def rates(logical_axes: Any) -> Any:
        return _by_axes(logical_axes, lambda kind: _rate(kind, ratio, optimizer.relative))

    def initial(boxed: Any) -> Any:
        return jax.tree.map(lambda box: _initial(box.names, box.value.shape, ratio), boxed, is_leaf=_is_box)

    return dataclasses.replace(
        optimizer, make=lambda logical_axes: optimizer.make(logical_axes, rates(logical_axes)), initial=initial
    )


def _initial(names: tuple[str | None, ...], shape: tuple[int, ...], ratio: float) -> float:
    if axes.RELPOS_BUCKETS in names:
        heads, buckets = shape[-2:]
        return ((heads + buckets) / (heads / ratio + buckets)) ** 0.5
    return ratio**-0.5 if kind(PartitionSpec(*names)) == 'output' else 1.0


def _rate(kind: str, ratio: float, relative: bool) -> float:
    if kind == 'other':
        return 1.0
    # The RMS of a matrix falls with sqrt(m), and that of an output matrix with m.
    rms = {'hidden': ratio**-0.5, 'output': 1 / ratio}[kind]
    return 1 / ratio / (rms if relative else 1.0)


def kind(spec: PartitionSpec) -> str:
    """Returns 'hidden' for a matrix between features, 'output' for one from features to others, otherwise 'other'."""
    names = [name for name in spec if name not in _STACKED]
    if len(names) < 2 or names[-2] not in _FEATURES:
        return 'other'
    return 'hidden' if names[-1] in _FEATURES else 'output'


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.LogicallyPartitioned)


def _by_axes(logical_axes: Any, value: Any) -> Any:
    return jax.tree.map(
        lambda spec: value(kind(spec)), logical_axes, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
