"""The kind of device that a program is traced for, and how a kernel runs on several devices.

Kernels exist for some devices, and loops over rows pay off on one. XLA's partitioner cannot look into a kernel, so each
device runs it on its own part of the arrays.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from remixer_t5x import axes


class _Target(NamedTuple):
    platform: str | None = None
    interpret: bool = False
    chip: str | None = None


_NO_TARGET = _Target()
_TARGET: contextvars.ContextVar[_Target] = contextvars.ContextVar('compile_target', default=_NO_TARGET)


@contextlib.contextmanager
def compiling_for(platform: str, interpret: bool = False, chip: str | None = None) -> Iterator[None]:
    """Traces for `platform`, although this process may only have CPUs.

    Args:
        platform: 'tpu' or 'gpu' for a program that the device's compiler will compile; 'accelerator' for a program
            that XLA:CPU compiles instead, which cannot contain kernels.
        interpret: translates kernels to operations that every device has, so that a program with the kernels of one
            platform runs slowly on another.
        chip: such as 'v3', if known; some kernels need a newer chip.
    """
    token = _TARGET.set(_Target(platform, interpret, chip))
    try:
        yield
    finally:
        _TARGET.reset(token)


def target_platform() -> str:
    """Returns 'cpu', 'tpu', 'gpu', or another platform of JAX."""
    return _TARGET.get().platform or jax.default_backend()


def is_described() -> bool:
    """Whether the program is for a device that this process may not have."""
    return _TARGET.get().platform is not None


def interprets_kernels() -> bool:
    """Whether kernels are translated to operations that every device has."""
    return _TARGET.get().interpret


def on_cpu() -> bool:
    """Whether the program runs on CPUs."""
    return target_platform() == 'cpu'


def on_single_cpu() -> bool:
    """Whether the program runs on one CPU device, where loops over the rows of a batch pay off.

    The data of one row stays in cache, and rows can be copied in place. With several devices the batch may be sharded,
    and a loop would gather every row; an accelerator would mostly wait between small steps.
    """
    return on_cpu() and jax.device_count() == 1


def bfloat16_refusal(dtype: Any) -> str | None:
    """Returns why a Pallas TPU kernel does not support products of this dtype, or None."""
    chip = _TARGET.get().chip
    if chip is None and not is_described() and jax.default_backend() == 'tpu':
        chip = jax.devices()[0].device_kind.removeprefix('TPU ')
    if dtype != jnp.bfloat16 or chip not in ('v2', 'v3'):
        return None
    return f'multiplies bfloat16 on a TPU v4 or newer and not on a {chip}'


def on_chip_memory(default: int) -> int:
    """Bytes of on-chip memory (VMEM) of this process's TPU; the default without a TPU."""
    if jax.default_backend() != 'tpu':
        return default
    # The import takes 0.3 s.
    from jax.experimental.pallas import tpu

    return tpu.get_tpu_info().vmem_capacity_bytes


def rows_and_heads(batch: int, heads: int) -> tuple[Any, Any]:
    """The mesh axes that shard the batch and the heads, each None if they do not divide the size."""
    mesh = jax.sharding.get_abstract_mesh()
    rules = nn.get_logical_axis_rules()
    names = nn.logical_to_mesh_axes((axes.BATCH, axes.HEADS)) if rules else PartitionSpec(None, None)

    def dividing(mesh_axes: Any, size: int) -> Any:
        parts = _count_parts(mesh, mesh_axes)
        return mesh_axes if parts > 1 and size % parts == 0 else None

    return dividing(names[0], batch), dividing(names[1], heads)


def heads_of_device(batch: int, heads: int) -> int:
    """The number of heads that each device computes."""
    return heads // _count_parts(jax.sharding.get_abstract_mesh(), rows_and_heads(batch, heads)[1])


def _count_parts(mesh: Any, mesh_axes: Any) -> int:
    names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
    return math.prod(mesh.shape.get(name, 1) for name in names)


def on_each_device(run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `run`, called on each device with its shard of the arguments."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)
