"""What kind of device a program is traced for: kernels exist for some, and loops over rows pay on one."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax


class _Target(NamedTuple):
    platform: str | None = None
    interpret: bool = False
    chip: str | None = None


_NO_TARGET = _Target()
_TARGET: contextvars.ContextVar[_Target] = contextvars.ContextVar('compile_target', default=_NO_TARGET)


@contextlib.contextmanager
def compiling_for(platform: str, interpret: bool = False, chip: str | None = None) -> Iterator[None]:
    """What is traced within is for `platform`, though this process may only have CPUs to compile it with.

    Args:
        platform: 'tpu' or 'gpu' for a program that the device's own compiler will see; 'accelerator' for one that
            XLA:CPU compiles in its place, which cannot contain kernels.
        interpret: kernels are translated to operations that every device has, so that a program with the kernels of
            one platform runs on another, slowly.
        chip: such as 'v3', where it is known; some kernels need a newer one.
    """
    token = _TARGET.set(_Target(platform, interpret, chip))
    try:
        yield
    finally:
        _TARGET.reset(token)


def target_platform() -> str:
    """'cpu', 'tpu', 'gpu', or another platform of JAX."""
    return _TARGET.get().platform or jax.default_backend()


def is_described() -> bool:
    """Whether the program is for a device that this process may not have."""
    return _TARGET.get().platform is not None


def target_chip() -> str:
    """Such as 'v3' or 'v5e' for a TPU; empty where it is unknown."""
    target = _TARGET.get()
    if target.chip or target.platform or jax.default_backend() != 'tpu':
        return target.chip or ''
    return jax.devices()[0].device_kind.removeprefix('TPU ')


def interprets_kernels() -> bool:
    """Whether kernels become operations of whatever device runs them."""
    return _TARGET.get().interpret


def on_cpu() -> bool:
    """Whether everything runs on CPU devices."""
    return target_platform() == 'cpu'


def on_single_cpu() -> bool:
    """Whether everything runs on one CPU device.

    There what one row needs stays in cache, and rows can be copied in place. With several devices the batch may be
    sharded, and a loop over its rows would gather every one; an accelerator is left waiting by small steps.
    """
    return on_cpu() and jax.device_count() == 1
