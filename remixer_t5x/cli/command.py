"""Defines the class `Command`, which describes a command of `remixer-t5x`."""

import argparse
import contextlib
import ctypes
import dataclasses
from collections.abc import Callable, Mapping

ON_CPU = {'JAX_PLATFORMS': 'cpu'}
# Options of mallopt(3).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `remixer-t5x`. Its module imports libraries lazily, so that `--help` and flag errors appear at once.

    Attributes:
        name: one word, or two words for a subcommand such as `data list`.
        run: runs the command and returns the exit code (None means 0).
        prints_result: whether the command prints its result to standard output, so that a write error must stop it.
            Other commands only print progress, and ignore write errors.
        env: environment variables to set before any library is imported.
        keeps_buffers: whether to call `keep_buffers` before the command runs.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    examples: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prints_result: bool = False
    keeps_buffers: bool = False


def keep_buffers() -> None:
    """Prevents glibc from returning large buffers to the operating system after every step, to avoid page faults."""
    # C libraries other than glibc do not provide mallopt.
    with contextlib.suppress(AttributeError):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 256 << 20)):
            ctypes.CDLL(None).mallopt(option, value)
