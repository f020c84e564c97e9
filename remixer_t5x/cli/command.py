"""Defines `Command`: the name, arguments and environment variables of a command."""

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
    """A command of `remixer-t5x`. Its module imports no library at top level, so `--help` and flag errors are fast.

    Attributes:
        name: one word, or two for a subcommand, such as `data list`.
        run: runs the command and returns the exit code (None is 0).
        prints_result: whether standard output is the result of the command, so that a write error stops it. Other
            commands only print progress, and ignore write errors.
        env: environment variables to set before any library is imported.
        keeps_buffers: whether to call `keep_buffers` first.
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
    """Stops glibc from returning large buffers to the system after every step, to avoid page faults."""
    # C libraries other than glibc do not provide mallopt.
    with contextlib.suppress(AttributeError):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 256 << 20)):
            ctypes.CDLL(None).mallopt(option, value)
