"""`Command`: a command's name, arguments and environment, known before any library is imported."""

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
    """One command of `remixer-t5x`. Its module imports no library on top, so that `--help` and wrong flags are quick.

    Attributes:
        name: one word, or two for an alternative to the command of the first: `data list`.
        help: one line.
        add_arguments: gives the parser the command's own arguments.
        run: does the work and returns the exit code (None is 0).
        examples: what to type, for `--help`.
        prints_result: the result of the command is its standard output, so it ends if that cannot be written. Other
            commands only inform there, and continue.
        env: environment variables to set before any library is imported.
        keeps_buffers: whether to call `keep_buffers`.
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
    """Stops glibc from returning large buffers to the system after every step, whose page faults cost time again."""
    # Other C libraries have no mallopt.
    with contextlib.suppress(AttributeError):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 256 << 20)):
            ctypes.CDLL(None).mallopt(option, value)
