"""Dense layers: one for all features, with an optional bias, and one for groups of features."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.kernels.compile_target import on_cpu, target_platform

# The matrices of an adapter (`models.lora`), [in, rank] and [rank, features], next to a kernel that has one.
LORA_IN, LORA_OUT = 'lora_in', 'lora_out'
# Normal with variance 1 / fan_in, as Hugging Face initialises T5. T5X truncates the normal of the
# feed-forward's and the logits' kernels, at the same variance.
FAN_IN_NORMAL = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')


def group_fan_in_normal(scale: float = 1.0) -> nn.initializers.Initializer:
    """Normal with variance `scale / in` for a kernel [groups, in, out]: the fan-in of one group."""
    return nn.initializers.variance_scaling(scale, 'fan_in', 'normal', batch_axis=0)


def whole_rows(kernel: jax.Array, names: tuple[str | None, ...], dtype: jnp.dtype) -> jax.Array:
    """Casts a kernel to `dtype` and gathers it along `embed`, which `fsdp` shards.

    Args:
        kernel: float32 parameter.
        names: the kernel's logical axes.
        dtype: dtype of the matmul.

    Without the constraint, XLA splits the matmul of a sharded kernel into small ones and exchanges the parts, which
    makes a layer a third slower on eight TPU v5e chips. The cast precedes the gather, so that devices exchange `dtype`.
    """
    whole = tuple(axes.ACTIVATION_EMBED if name == axes.EMBED else name for name in names)
    return nn.with_logical_constraint(kernel.astype(dtype), whole)


class Dense(nn.Module):
    """`x @ kernel`, [..., in] -> [..., features], in x's dtype with a float32 kernel.

    On a CPU leading axes are flattened around the matmul, because XLA:CPU turns the backward pass of a
    three-dimensional input into slow fused transposes. On a TPU the same reshape would cost copies between layouts and
    a zero fill of what each layer saves for the backward pass: a third of an encoder's time.

    If the parameters contain an adapter (LoRA, Hu et al. 2021), `(x @ lora_in) @ lora_out` is added; `init` creates
    no adapter.

    Attributes:
        features: width of the output.
        axes: logical names of the kernel's two axes.
        kernel_init: initialiser of the kernel.
        use_bias: adds a learned bias, initialised with 0; T5 has no biases, BERT and GPT-2 have them in all layers.
    """

    features: int
    axes: tuple[str | None, str | None]
    kernel_init: nn.initializers.Initializer = FAN_IN_NORMAL
    use_bias: bool = False

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self._parameters(x.shape[-1])
        y = matmul(x, whole_rows(kernel, self.axes, x.dtype))
        if self.has_variable('params', LORA_IN):
            y = y + _low_rank(self, x, matmul)
        return y if bias is None else y + bias.astype(y.dtype)

    def kernel(self, width: int, dtype: jnp.dtype) -> jax.Array:
        """[width, features] in `dtype`, for a caller that multiplies by it; the product of an adapter is part of it."""
        kernel, _ = self._parameters(width)
        if self.has_variable('params', LORA_IN):
            kernel = merge_adapter(kernel, *(self.get_variable('params', name) for name in (LORA_IN, LORA_OUT)))
        return whole_rows(kernel, self.axes, dtype)

    @nn.compact
    def _parameters(self, width: int) -> tuple[jax.Array, jax.Array | None]:
        """The float32 kernel [width, features], and the bias [features] or None."""

        def parameter(name: str, init: nn.initializers.Initializer, names: tuple, shape: tuple) -> jax.Array:
            return self.param(name, nn.with_logical_partitioning(init, names), shape, jnp.float32)

        kernel = parameter('kernel', self.kernel_init, self.axes, (width, self.features))
        if not self.use_bias:
            return kernel, None
        return kernel, parameter('bias', nn.initializers.zeros, self.axes[1:], (self.features,))


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """[..., in] -> [..., features]; see `Dense` for how."""
    if not on_cpu():
        return x @ kernel
    tokens = x.reshape(-1, x.shape[-1])
    return (tokens @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class Product(NamedTuple):
    """An uncomputed product `left @ right`, [..., depth] @ [depth, features], that a caller may fuse with another."""

    left: jax.Array
    right: jax.Array

    def value(self) -> jax.Array:
        return matmul(self.left, self.right)


def merge_adapter(kernel: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns a kernel merged with its adapter, W + A B, [..., in, out]; leading axes are layers and groups."""
    product = jnp.einsum('...ir,...ro->...io', first, second, precision=jax.lax.Precision.HIGHEST)
    return kernel + product


def _low_rank(module: nn.Module, x: Any, matmul: Callable[[Any, jax.Array], Any]) -> Any:
    """Returns the term that the adapter of a `Dense` or a `GroupDense` adds to its output."""
    first, second = (module.get_variable('params', name) for name in (LORA_IN, LORA_OUT))
    *groups, inward, outward = module.axes
    dtype = jax.tree.leaves(x)[0].dtype
    first = whole_rows(first, (*groups, inward, axes.LORA_RANK), dtype)
    second = whole_rows(second, (*groups, axes.LORA_RANK, outward), dtype)
    # The order makes it cheap: the product of the two is as large as the kernel.
    return matmul(matmul(x, first), second)


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """[batch, length, heads * kv] -> [batch, length, heads, kv]."""
    return x.reshape(*x.shape[:-1], num_heads, -1)


# Groups of features, as arrays [groups, ..., width]: one array of all groups, or some arrays of fewer.
Groups: TypeAlias = tuple[jax.Array, ...]


def split_groups(x: jax.Array, num_groups: int, num_arrays: int = 1) -> Groups:
    """[..., groups * width] -> `num_arrays` arrays [groups / num_arrays, ..., width], the input of `GroupDense`.

    A sublayer splits its input, joins its output, and keeps everything between in this form. Groups lead because every
    matmul is then one batched matmul. On a TPU this order would be a copy of every input and output; matmuls of one
    group each read and write its features where they are.
    """
    parts = jnp.split(x, num_arrays, axis=-1)
    return tuple(jnp.moveaxis(part.reshape(*x.shape[:-1], num_groups // num_arrays, -1), -2, 0) for part in parts)


def join_groups(groups: Groups) -> jax.Array:
    """Arrays [groups, ..., width] -> [..., all groups * width]."""
    joined = [jnp.moveaxis(array, 0, -2) for array in groups]
    return jnp.concatenate([array.reshape(*array.shape[:-2], -1) for array in joined], axis=-1)


class GroupDense(nn.Module):
    """`x[j] @ kernel[j]` for each group j (GroupLinear of TIM), arrays [groups, ..., in] -> [groups, ..., features].

    If the parameters contain an adapter, each group has its own low-rank matrices, as in `Dense`.

    Attributes:
        features: width of a group's output.
        axes: logical names of the kernel's three axes: groups, in, out.
        kernel_init: initialiser of the kernel.
    """

    features: int
    axes: tuple[str | None, str | None, str | None]
    kernel_init: nn.initializers.Initializer = group_fan_in_normal()

    @nn.compact
    def __call__(self, x: Groups) -> Groups:
        init = nn.with_logical_partitioning(self.kernel_init, self.axes)
        shape = (sum(array.shape[0] for array in x), x[0].shape[-1], self.features)
        kernel = self.param('kernel', init, shape, jnp.float32)
        y = _group_matmul(x, whole_rows(kernel, self.axes, x[0].dtype))
        if not self.has_variable('params', LORA_IN):
            return y
        return jax.tree.map(jnp.add, y, _low_rank(self, x, _group_matmul))


def _group_matmul(x: Groups, kernel: jax.Array) -> Groups:
    ends = itertools.accumulate(array.shape[0] for array in x)
    return tuple(_batched_matmul(array, kernel[end - array.shape[0] : end]) for array, end in zip(x, ends, strict=True))


def _batched_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    if target_platform() == 'gpu':
        # cuBLAS reads and writes groups that are side by side in memory, if tokens are one axis. Then the transposes
        # of `split_groups` and `join_groups` copy nothing.
        tokens = jnp.moveaxis(x, 0, -2)
        y = jnp.einsum('tgd,gdf->tgf', tokens.reshape(-1, *tokens.shape[-2:]), kernel)
        return jnp.moveaxis(y.reshape(*tokens.shape[:-1], -1), -2, 0)
    if not on_cpu():
        return jnp.einsum('g...d,gdf->g...f', x, kernel)
    tokens = x.reshape(x.shape[0], -1, x.shape[-1])
    return (tokens @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])
