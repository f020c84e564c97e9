"""LoRA adapters (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1).

    y = x W + x A B        W frozen [in, out], A [in, rank], B [rank, out]
    y = x W[j] + x A[j] B[j]                  for each group j of a `GroupDense`, whose W is [groups, in, out]

A is drawn from a normal distribution with variance `1 / in`, and B is initialized to zero. The paper's scale alpha /
rank is omitted, because it only changes the learning rate of B. A is stored as `lora_in` and B as `lora_out`, next to
W, which is named `kernel`; merging an adapter adds A B to W.
"""

import dataclasses
import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import traverse_util

from remixer_t5x import axes, ranges
from remixer_t5x.errors import UserError
from remixer_t5x.models.layers.dense import LORA_IN, LORA_OUT, Dense, GroupDense

Params = Any


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Settings of LoRA adapters.

    Attributes:
        modules: regular expression for the names of adapted layers, such as `encoder/run_0/layer/self_attention/query`.
    """

    modules: str
    rank: ranges.Count

    def __post_init__(self) -> None:
        ranges.check_fields(self, modules='LORA', rank='LORA_RANK')
        check_regex('LORA', self.modules, 'query|value')

    def init(self, init_base: Callable[[], Params], rng: jax.Array) -> Params:
        """Returns the boxed parameters computed by `init_base`, with A and B added to each adapted layer.

        The output projection cannot be adapted, because the loss reads its kernel directly.
        """
        layers: set[str] = set()

        def record_layer_name(call, args, kwargs, context):
            if isinstance(context.module, Dense | GroupDense) and context.module.path[0] in ('encoder', 'decoder'):
                layers.add('/'.join(context.module.path))
            return call(*args, **kwargs)

        with nn.intercept_methods(record_layer_name):
            params = traverse_util.flatten_dict(init_base(), sep='/')
        adapted_layers = [name for name in sorted(layers) if re.search(self.modules, name)]
        if not adapted_layers:
            names = ', '.join(sorted({name.rpartition('/layer/')[2] for name in layers}))
            raise UserError(f'LORA must match the name of a dense layer, got {self.modules!r}; use one of {names}')
        for name in adapted_layers:
            kernel = params[f'{name}/kernel']
            (*stacked, inputs, outputs), (*stacked_axes, input_axis, output_axis) = kernel.value.shape, kernel.names
            # Derive the key from the name, so that a layer's initial values do not depend on the other layers.
            key = jax.random.fold_in(rng, zlib.crc32(name.encode()))
            first = jax.random.normal(key, (*stacked, inputs, self.rank)) * inputs**-0.5
            second = jnp.zeros((*stacked, self.rank, outputs))
            first_axes, second_axes = (input_axis, axes.LORA_RANK), (axes.LORA_RANK, output_axis)
            params[f'{name}/{LORA_IN}'] = nn.LogicallyPartitioned(first, (*stacked_axes, *first_axes))
            params[f'{name}/{LORA_OUT}'] = nn.LogicallyPartitioned(second, (*stacked_axes, *second_axes))
        return traverse_util.unflatten_dict(params, sep='/')


def check_regex(setting: str, pattern: str, example: str) -> None:
    """Raises UserError if `pattern`, the value of a setting, is not a valid regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        message = f'{setting} must be a regular expression, got {pattern!r} ({error})'
        raise UserError(f'{message}; for example, set {setting} = {example!r}') from error


def with_adapters(model: Any, modules: str | None = None, rank: ranges.Count = 8) -> Any:
    """Returns `model` with LoRA adapters, or `model` unchanged if `modules` is None."""
    return model if modules is None else dataclasses.replace(model, lora=LoraConfig(modules, rank))


def is_adapter(name: str) -> bool:
    """Returns whether a parameter, named by its path joined with '/', is a matrix of a LoRA adapter."""
    return name.rpartition('/')[2] in (LORA_IN, LORA_OUT)


def get_adapted_kernel_name(name: str) -> str:
    """Returns the name of the kernel that the LoRA matrix named `name` adapts."""
    return f'{name.rpartition("/")[0]}/kernel'


def get_adapter_names(kernel: str) -> tuple[str, str]:
    """Returns the names of the LoRA matrices A and B that adapt the kernel named `kernel`."""
    layer = kernel.rpartition('/')[0]
    return f'{layer}/{LORA_IN}', f'{layer}/{LORA_OUT}'
