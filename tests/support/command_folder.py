"""A working directory for commands that run in the test process."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from unittest import mock

import gin


@contextlib.contextmanager
def working_directory(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Changes to `folder`; restores the environment variables and clears the gin configuration at the end."""
    with mock.patch.dict(os.environ), contextlib.chdir(folder):
        try:
            yield folder
        finally:
            gin.clear_config()
