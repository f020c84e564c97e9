"""Where loops over rows or tokens pay: on the device that a program is traced for."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax

_FOR_ACCELERATOR = contextvars.ContextVar('for_accelerator', default=False)


@contextlib.contextmanager
def as_for_accelerator() -> Iterator[None]:
    """What is traced within is for an accelerator, though this process may only have CPUs to compile it with."""
    token = _FOR_ACCELERATOR.set(True)
    try:
        yield
    finally:
        _FOR_ACCELERATOR.reset(token)


def on_cpu() -> bool:
    """Whether everything runs on CPU devices."""
    return jax.default_backend() == 'cpu' and not _FOR_ACCELERATOR.get()


def on_single_cpu() -> bool:
    """Whether everything runs on one CPU device.

    There what one row needs stays in cache, and rows can be copied in place. With several devices the batch may be
    sharded, and a loop over its rows would gather every one; an accelerator is left waiting by small steps.
    """
    return on_cpu() and jax.device_count() == 1
