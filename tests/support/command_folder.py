"""A working directory for commands that run in the test process."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import gin


@contextlib.contextmanager
def working_directory(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Changes to `folder`; restores the environment variables and clears the gin configuration at the end."""
    environment = dict(os.environ)
    try:
        with contextlib.chdir(folder):
            yield folder
    finally:
        os.environ.clear()
        os.environ.update(environment)
        gin.clear_config()
