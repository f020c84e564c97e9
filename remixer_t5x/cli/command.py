"""What `main` knows of a command before any library is imported."""

import argparse
import dataclasses
from collections.abc import Callable, Mapping

ON_CPU = {'JAX_PLATFORMS': 'cpu'}
# glibc returns large buffers to the system after every step and pays their page faults again; keeping them is faster.
KEEP_BUFFERS = {
    'MALLOC_MMAP_THRESHOLD_': '4294967296',
    'MALLOC_TRIM_THRESHOLD_': '17179869184',
    'MALLOC_TOP_PAD_': '268435456',
}


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
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    examples: tuple[str, ...]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prints_result: bool = False
