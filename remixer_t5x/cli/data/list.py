"""`remixer-t5x data list`: every task, its splits, and whether and where its data is here."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from remixer_t5x.cli import arguments, console
from remixer_t5x.cli.command import ON_CPU, Command

if TYPE_CHECKING:
    from remixer_tasks.catalogue import TaskStatus

# Long enough for any path: a line of a file is not wrapped.
_PIPE_WIDTH = 1000
_UNLISTED = (
    'Corpora for pretraining are configurations of their own: data/python_docs.gin, data/own_text.gin, data/c4.gin'
)
# Also of `data show`.
DATA_DIR_HELP = 'search this folder alone (default: TFDS_DATA_DIR, then REMIXER_T5X_DATA, then downloads)'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--data_dir', metavar='DIR', help=DATA_DIR_HELP)


def run(args: argparse.Namespace) -> None:
    """Prints a row for each task."""
    with arguments.libraries(args):
        from remixer_tasks import catalogue
    tasks = catalogue.status(args.data_dir)
    table = console.table()
    for heading in ('task', 'here', 'not here', 'where'):
        table.add_column(heading, overflow='fold', no_wrap=heading == 'task')
    for task in tasks:
        here = [f'{split.name} {split.amount}'.strip() for split in task.splits if split.origin]
        missing = [split.name for split in task.splits if not split.origin]
        table.add_row(task.name, ' · '.join(here), ', '.join(missing), _where(task))
    whole = sum(all(split.origin for split in task.splits) for task in tasks)
    summary = f'{whole} of {len(tasks)} tasks are here; downloads go to {catalogue.download_folder(args.data_dir)}'
    console.show(table, summary, _UNLISTED, pipe_width=_PIPE_WIDTH)


def _where(task: TaskStatus) -> str:
    """The folder of its files, or what to do about missing ones."""
    paths = [path for split in task.splits if split.origin for path in split.origin.split(', ')]
    if paths:
        folders = {path if os.path.isdir(path) else os.path.dirname(path) for path in paths}
        return ', '.join(sorted(folders))
    return f'remixer-t5x data get {task.name}' if task.has_download else f'no download: data get {task.name} says more'


COMMAND = Command(
    'data list',
    'every labelled task, its splits, and whether its data is here',
    add_arguments,
    run,
    ('remixer-t5x data list',),
    ON_CPU,
    prints_result=True,
)
