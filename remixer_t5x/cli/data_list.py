"""`remixer-t5x data list`: every task, its splits, and whether and where its data is here."""

import os
import sys
from collections.abc import Sequence
from typing import Protocol

from rich import box
from rich.console import Console
from rich.table import Table

# Long enough for any path: a line of a file is not wrapped.
_PIPE_WIDTH = 1000
_UNLISTED = (
    'Corpora for pretraining are configurations of their own: data/python_docs.gin, data/own_text.gin, data/c4.gin'
)


class Split(Protocol):
    """origin: where it is read from, None where it is not here. amount: how much there is of it."""

    name: str
    origin: str | None
    amount: str


class Listed(Protocol):
    """A task. downloads: whether `data get` can get its data."""

    name: str
    splits: Sequence[Split]
    downloads: bool


def run(tasks: Sequence[Listed], download_folder: str) -> None:
    """Prints a row for each task; gin binds the arguments in `runs/data_list.gin`."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ('task', 'here', 'not here', 'where'):
        table.add_column(heading, overflow='fold', no_wrap=heading == 'task')
    for task in tasks:
        here = [f'{split.name} {split.amount}'.strip() for split in task.splits if split.origin]
        missing = [split.name for split in task.splits if not split.origin]
        table.add_row(task.name, ' · '.join(here), ', '.join(missing), _where(task))
    whole = sum(all(split.origin for split in task.splits) for task in tasks)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    with console.capture() as captured:
        console.print(table)
        for line in (f'{whole} of {len(tasks)} tasks are here; downloads go to {download_folder}', _UNLISTED):
            console.print(line, soft_wrap=True)
    sys.stdout.write(captured.get())


def _where(task: Listed) -> str:
    """The folder of its files, or what to do about missing ones."""
    paths = [path for split in task.splits if split.origin for path in split.origin.split(', ')]
    if paths:
        folders = {path if os.path.isdir(path) else os.path.dirname(path) for path in paths}
        return ', '.join(sorted(folders))
    return f'remixer-t5x data get {task.name}' if task.downloads else f'no download: data get {task.name} says more'
