"""Determines the platform for which a program is traced, and helps to run kernels on sharded arrays.

The platform determines whether an operation uses a device kernel. XLA cannot partition kernels, so each device runs a
kernel on its shards of the arrays, in `shard_map`.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec

from remixer_t5x import axes


class _CompileTarget(NamedTuple):
    platform: str | None = None
    interpret: bool = False


_DEFAULT_TARGET = _CompileTarget()
_COMPILE_TARGET = contextvars.ContextVar('compile_target', default=_DEFAULT_TARGET)


@contextlib.contextmanager
def compile_for_platform(platform: str, interpret: bool = False) -> Iterator[None]:
    """Traces programs for `platform` in this context, even if this process has no such device.

    Args:
        platform: 'tpu', 'gpu', or 'accelerator'. 'accelerator' is for programs that are written for a TPU or GPU but
            cannot contain kernels, for example because XLA:CPU compiles them.
        interpret: whether to run kernels in Pallas's interpreter, which works on all devices.
    """
    token = _COMPILE_TARGET.set(_CompileTarget(platform, interpret))
    try:
        yield
    finally:
        _COMPILE_TARGET.reset(token)


def get_target_platform() -> str:
    """Returns the platform for which programs are traced, such as 'cpu', 'tpu' or 'gpu'."""
    return _COMPILE_TARGET.get().platform or jax.default_backend()


def is_cross_compiling() -> bool:
    """Returns whether the caller runs inside `compile_for_platform`, which traces programs for another device."""
    return _COMPILE_TARGET.get().platform is not None


def is_interpreting_kernels() -> bool:
    return _COMPILE_TARGET.get().interpret


def targets_cpu() -> bool:
    return get_target_platform() == 'cpu'


def targets_single_cpu() -> bool:
    """Returns whether loops over the rows of a batch are fast.

    On a single CPU device, the data of one row remains in cache. With multiple devices, the batch may be sharded, and a
    loop would gather every row. On accelerators, one row is too small to use the whole device.
    """
    return targets_cpu() and jax.device_count() == 1


def get_batch_and_head_axes(batch: int, heads: int) -> tuple[Any, Any]:
    """Returns the mesh axes that shard the batch and the heads; None if they do not divide the dimension evenly."""
    mesh = jax.sharding.get_abstract_mesh()
    rules = nn.get_logical_axis_rules()
    names = nn.logical_to_mesh_axes((axes.BATCH, axes.HEADS)) if rules else PartitionSpec(None, None)

    def get_axes_if_divisible(mesh_axes: Any, size: int) -> Any:
        mesh_names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ()
        shards = math.prod(mesh.shape.get(name, 1) for name in mesh_names)
        return mesh_axes if shards > 1 and size % shards == 0 else None

    return get_axes_if_divisible(names[0], batch), get_axes_if_divisible(names[1], heads)


def wrap_in_shard_map(run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Wraps `run` in `shard_map`, or returns it unchanged if there is no mesh or the mesh has a single device.

    An operand or result that is None may have a partition spec, which is ignored.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return run
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, check_vma=False)
