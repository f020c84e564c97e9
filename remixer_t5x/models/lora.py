"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1).

    y = x W + x A B        W frozen [in, out], A [in, rank], B [rank, out]
    y = x W[j] + x A[j] B[j]                  for each group j of a `GroupDense`, whose W is [groups, in, out]

A starts as a random normal of variance 1 / in and B at zero, so that an adapted model starts as the model that it
adapts. The paper's scale alpha / rank is 1: it only scales the learning rate of B. Every `Dense` and `GroupDense` of
the encoder and the decoder can be adapted; they read the two matrices where the parameters have them (`lora_in` and
`lora_out` next to `kernel`), and a merge adds A B to W.
"""

import dataclasses
import functools
import re
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

from remixer_t5x import axes, ranges
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.dense import LORA_IN, LORA_OUT, Dense, GroupDense

Params = Any
STACKS = ('encoder', 'decoder')


@dataclasses.dataclass(frozen=True)
class Lora:
    """`modules`, a regular expression, is found in the names of the adapted layers, such as
    `encoder/run_0/layer/self_attention/query`; `rank` is the width of A.
    """

    modules: str
    rank: ranges.Count


def adapted(model: Any, modules: str | None = None, rank: ranges.Count = 8) -> Any:
    """`model` with adapters; without `modules` the model itself.

    The result is of a subclass of the model's class, with the adapters' matrices among the parameters that `init`
    makes. Raises UserError for a rank that is not positive or an expression that is not regular; `init` raises it if no
    layer has such a name.
    """
    if modules is None:
        return model
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise UserError(f'LORA_RANK is {rank!r}; it takes a number, 1 or more, such as 8')
    try:
        re.compile(modules)
    except (re.error, TypeError) as error:
        raise UserError(
            f"LORA is {modules!r}, which is not a regular expression ({error}); it takes one such as 'query|value'"
        ) from error
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    kind: Any = type(model)
    return _subclass(kind)(**fields, lora=Lora(modules, rank))


@functools.cache
def _subclass(kind: Any) -> Any:
    def init(self: Any, rng: jax.Array, batch_shapes: Mapping[str, tuple[int, ...]]) -> Params:
        layers: set[str] = set()

        def record(call, args, kwargs, context):
            if isinstance(context.module, Dense | GroupDense):
                layers.add('/'.join(context.module.path))
            return call(*args, **kwargs)

        with nn.intercept_methods(record):
            params = kind.init(self, rng, batch_shapes)
        return _added(params, _chosen(layers, self.lora), self.lora.rank, rng)

    extra = [('lora', Lora | None, dataclasses.field(default=None))]
    return dataclasses.make_dataclass(
        f'{kind.__name__}WithLora', extra, bases=(kind,), namespace={'init': init}, frozen=True
    )


def _chosen(layers: set[str], lora: Lora) -> list[str]:
    """The names of the layers to adapt. The output projection is not one: the loss reads its kernel itself."""
    possible = sorted(name for name in layers if name.split('/')[0] in STACKS)
    chosen = [name for name in possible if re.search(lora.modules, name)]
    if not chosen:
        raise UserError(
            f'LORA is {lora.modules!r}, which is found in the name of no dense layer; they are '
            f'{", ".join(sorted({name.rpartition("/layer/")[2] for name in possible}))}'
        )
    return chosen


def _added(params: Params, layers: list[str], rank: int, rng: jax.Array) -> Params:
    """The boxed `params` with the two matrices next to the kernel of each layer."""
    flat = traverse_util.flatten_dict(params, sep='/')
    for name in layers:
        kernel = flat[f'{name}/kernel']
        (*stacked, wide, features), (*over, inward, outward) = kernel.value.shape, kernel.names
        # By the name, so that adapting one layer more does not change the others.
        key = jax.random.fold_in(rng, zlib.crc32(name.encode()))
        first = jax.random.normal(key, (*stacked, wide, rank)) * wide**-0.5
        flat[f'{name}/{LORA_IN}'] = nn.LogicallyPartitioned(first, (*over, inward, axes.LORA_RANK))
        second = jnp.zeros((*stacked, rank, features))
        flat[f'{name}/{LORA_OUT}'] = nn.LogicallyPartitioned(second, (*over, axes.LORA_RANK, outward))
    return traverse_util.unflatten_dict(flat, sep='/')


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name, a path joined by '/', is a matrix of an adapter."""
    return name.rpartition('/')[2] in (LORA_IN, LORA_OUT)


def kernel_of(name: str) -> str:
    """The name of the kernel that the matrix `name` adapts."""
    return f'{name.rpartition("/")[0]}/kernel'


def matrices_of(kernel: str) -> tuple[str, str]:
    """The names of the two matrices that adapt the kernel `kernel`."""
    layer = kernel.rpartition('/')[0]
    return f'{layer}/{LORA_IN}', f'{layer}/{LORA_OUT}'
