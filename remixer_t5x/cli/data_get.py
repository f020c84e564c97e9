"""`remixer-t5x data get NAME`: the published files of a task, downloaded or taken from a folder, and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable


def run(
    get: Callable[[str, str | None, str | None], list[str]],
    name: str,
    source: str | None = None,
    data_dir: str | None = None,
) -> None:
    """Gets the files and prints where they are; gin binds the arguments in `runs/data_get.gin`.

    Args:
        get: called with the other arguments, returns the lines to print.
        name: a task or data set.
        source: a folder that holds the published files, None downloads them.
        data_dir: where the files go; None is the folder of downloads.

    Raises:
        UserError: from `get`, where the files cannot be had.
    """
    sys.stdout.write('\n'.join(get(name, source, data_dir)) + '\n')
