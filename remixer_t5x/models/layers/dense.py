"""Parameters, dropout, and dense layers with optional LoRA adapters: `Dense`, and `GroupDense` with grouped kernels."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn

from remixer_t5x import axes
from remixer_t5x.kernels.compile_target import get_target_platform, targets_cpu

# Parameter names of a LoRA adapter (`models.lora`), with shapes [in, rank] and [rank, features].
LORA_IN, LORA_OUT = 'lora_in', 'lora_out'
# Initializer of Hugging Face's T5. T5X uses a truncated normal distribution with the same variance for feed-forward
# layers and the output projection.
FAN_IN_NORMAL = nn.initializers.variance_scaling(1.0, 'fan_in', 'normal')


def group_fan_in_normal(scale: float = 1.0) -> nn.initializers.Initializer:
    """Returns a normal initializer with variance `scale / in` for kernels [groups, in, out]."""
    return nn.initializers.variance_scaling(scale, 'fan_in', 'normal', batch_axis=0)


def create_param(
    module: nn.Module,
    name: str,
    init: nn.initializers.Initializer,
    names: tuple[str | None, ...],
    shape: tuple[int, ...],
) -> jax.Array:
    """Creates a float32 parameter with the logical axes `names`; call within an `nn.compact` method or `setup`."""
    return module.param(name, nn.with_logical_partitioning(init, names), shape, jnp.float32)


def cast_and_gather(kernel: jax.Array, names: tuple[str | None, ...], dtype: jnp.dtype) -> jax.Array:
    """Casts a kernel with the logical axes `names` and gathers it along the `embed` axis, which `fsdp` may shard.

    Without the sharding constraint, XLA splits the matmul into smaller matmuls and exchanges partial results, which
    makes a layer a third slower on eight TPU v5e chips. The cast precedes the gather to reduce the communication.
    """
    whole = tuple(axes.ACTIVATION_EMBED if name == axes.EMBED else name for name in names)
    return nn.with_logical_constraint(kernel.astype(dtype), whole)


class Dense(nn.Module):
    """Dense layer that maps [..., in] to [..., features], with a float32 kernel cast to the dtype of x.

    If the parameters contain a LoRA adapter (Hu et al. 2021), `(x @ lora_in) @ lora_out` is added to the output; `init`
    does not create adapters.

    Attributes:
        axes: logical names of the kernel's two axes.
        use_bias: whether to add a learned bias, initialized to 0, as in BERT and GPT-2; T5 has no biases.
    """

    features: int
    axes: tuple[str | None, str | None]
    kernel_init: nn.initializers.Initializer = FAN_IN_NORMAL
    use_bias: bool = False

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self._create_parameters(x.shape[-1])
        y = matmul(x, cast_and_gather(kernel, self.axes, x.dtype))
        if self.has_variable('params', LORA_IN):
            y = y + _compute_lora_update(self, x, matmul)
        return y if bias is None else y + bias.astype(y.dtype)

    def get_merged_kernel(self, width: int, dtype: jnp.dtype) -> jax.Array:
        """Returns the kernel, [width, features] in `dtype`, merged with its LoRA adapter if there is one."""
        kernel, _ = self._create_parameters(width)
        if self.has_variable('params', LORA_IN):
            kernel = merge_adapter(kernel, *(self.get_variable('params', name) for name in (LORA_IN, LORA_OUT)))
        return cast_and_gather(kernel, self.axes, dtype)

    @nn.compact
    def _create_parameters(self, width: int) -> tuple[jax.Array, jax.Array | None]:
        """Returns the float32 kernel [width, features] and the bias [features] or None."""
        kernel = create_param(self, 'kernel', self.kernel_init, self.axes, (width, self.features))
        if not self.use_bias:
            return kernel, None
        return kernel, create_param(self, 'bias', nn.initializers.zeros, self.axes[1:], (self.features,))


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies x [..., in] by a kernel [in, features].

    XLA:CPU turns the backward pass of a three-dimensional matmul into slow fused transposes. On TPUs, flattening the
    leading axes would add layout copies and zero-filled buffers, which would take a third of an encoder's time.
    """
    if not targets_cpu():
        return x @ kernel
    tokens = x.reshape(-1, x.shape[-1])
    return (tokens @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


class LazyProduct(NamedTuple):
    """The unevaluated product of `left` [..., depth] and `right` [depth, features], which callers can fuse."""

    left: jax.Array
    right: jax.Array

    def compute_product(self) -> jax.Array:
        return matmul(self.left, self.right)


def merge_adapter(kernel: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns a kernel merged with its LoRA adapter, W + A B, [..., in, out]."""
    return kernel + jnp.einsum('...ir,...ro->...io', first, second, precision=jax.lax.Precision.HIGHEST)


def _compute_lora_update(module: nn.Module, x: Any, matmul: Callable[[Any, jax.Array], Any]) -> Any:
    """Returns the term that the LoRA adapter of a `Dense` or `GroupDense` adds to the output."""
    first, second = (module.get_variable('params', name) for name in (LORA_IN, LORA_OUT))
    *groups, in_axis, out_axis = module.axes
    dtype = jax.tree.leaves(x)[0].dtype
    first = cast_and_gather(first, (*groups, in_axis, axes.LORA_RANK), dtype)
    second = cast_and_gather(second, (*groups, axes.LORA_RANK, out_axis), dtype)
    # Multiply x by the small matrices one after the other; their product would be as large as the kernel.
    return matmul(matmul(x, first), second)


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
    """Reshapes [batch, length, heads * kv] to [batch, length, heads, kv]."""
    return x.reshape(*x.shape[:-1], num_heads, -1)


# Feature groups as one array [groups, ..., width], or as several arrays that each contain some of the groups.
FeatureGroups: TypeAlias = tuple[jax.Array, ...]


def split_groups(x: jax.Array, num_groups: int, num_arrays: int = 1) -> FeatureGroups:
    """Splits [..., groups * width] into `num_arrays` arrays [groups / num_arrays, ..., width] for `GroupDense`.

    With the leading groups axis, each layer is one batched matmul. On a TPU, this layout would require a copy of every
    input and output, so use one array per group there.
    """
    parts = jnp.split(x, num_arrays, axis=-1)
    return tuple(jnp.moveaxis(part.reshape(*x.shape[:-1], num_groups // num_arrays, -1), -2, 0) for part in parts)


def join_groups(groups: FeatureGroups) -> jax.Array:
    """Inverts `split_groups`: joins arrays [groups, ..., width] into one array [..., features]."""
    joined = [jnp.moveaxis(array, 0, -2) for array in groups]
    return jnp.concatenate([array.reshape(*array.shape[:-2], -1) for array in joined], axis=-1)


class GroupDense(nn.Module):
    """Dense layer with a separate kernel for each feature group, `x[j] @ kernel[j]` (GroupLinear of TIM).

    Maps arrays [groups, ..., in] to [groups, ..., features]. LoRA adapters have separate matrices for each group.

    Attributes:
        axes: logical names of the kernel's three axes: groups, in, out.
    """

    features: int
    axes: tuple[str | None, str | None, str | None]
    kernel_init: nn.initializers.Initializer = group_fan_in_normal()

    @nn.compact
    def __call__(self, x: FeatureGroups) -> FeatureGroups:
        shape = (sum(array.shape[0] for array in x), x[0].shape[-1], self.features)
        kernel = create_param(self, 'kernel', self.kernel_init, self.axes, shape)
        y = _group_matmul(x, cast_and_gather(kernel, self.axes, x[0].dtype))
        if not self.has_variable('params', LORA_IN):
            return y
        return jax.tree.map(jnp.add, y, _compute_lora_update(self, x, _group_matmul))


def _group_matmul(x: FeatureGroups, kernel: jax.Array) -> FeatureGroups:
    ends = itertools.accumulate(array.shape[0] for array in x)
    return tuple(_batched_matmul(array, kernel[end - array.shape[0] : end]) for array, end in zip(x, ends, strict=True))


def _batched_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    if get_target_platform() == 'gpu':
        # With all tokens in one axis, cuBLAS can read and write arrays [tokens, groups, width], so the transposes in
        # `split_groups` and `join_groups` need no copies.
        tokens = jnp.moveaxis(x, 0, -2)
        y = jnp.einsum('tgd,gdf->tgf', tokens.reshape(-1, *tokens.shape[-2:]), kernel)
        return jnp.moveaxis(y.reshape(*tokens.shape[:-1], -1), -2, 0)
    if not targets_cpu():
        return jnp.einsum('g...d,gdf->g...f', x, kernel)
    tokens = x.reshape(x.shape[0], -1, x.shape[-1])
    return (tokens @ kernel).reshape(*x.shape[:-1], kernel.shape[-1])


def dropout(rate: float, x: jax.Array, shared_axis: int = -2, *, deterministic: bool) -> jax.Array:
    """Zeroes elements of `x` with probability `rate` and scales up the others; call within an `nn.compact` method.

    All elements along `shared_axis` share one mask. For features [batch, length, features], the default axis drops the
    same features of all tokens of a row, which needs fewer random values than a mask for each token. For attention
    values [..., kv], the axis -1 drops whole value vectors, which equals dropout on the attention weights with one mask
    for all queries.
    """
    if rate == 0.0 or deterministic:
        return x
    return nn.Dropout(rate, broadcast_dims=(shared_axis,))(x, deterministic=False)
