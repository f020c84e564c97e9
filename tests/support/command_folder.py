"""A folder in which a test's commands run in the test's own process."""

import contextlib
import os
import pathlib
from collections.abc import Iterator

import gin


@contextlib.contextmanager
def entered(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """The current folder is `folder`; what commands change in the environment and in gin is undone at the end."""
    environment = dict(os.environ)
    try:
        with contextlib.chdir(folder):
            yield folder
    finally:
        os.environ.clear()
        os.environ.update(environment)
        gin.clear_config()
