"""`remixer-t5x data get NAME`: the published files of a task, downloaded or taken from a folder, and checked."""

import argparse

from remixer_t5x.cli import arguments
from remixer_t5x.cli.command import ON_CPU, Command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('name', metavar='NAME', help='a task or data set, as `data list` names them')
    source = 'take the published files from this folder, without the network'
    parser.add_argument('--from', dest='source', metavar='DIR', help=source)
    place = 'where the files go (default: REMIXER_T5X_CACHE/data, or ~/.cache/remixer_t5x/data)'
    parser.add_argument('--data_dir', metavar='DIR', help=place)


def run(args: argparse.Namespace) -> None:
    """Gets the files and prints where they are. Raises UserError where they cannot be had."""
    with arguments.libraries(args):
        from remixer_tasks.files import download
    print('\n'.join(download.get(args.name, args.source, args.data_dir)))


COMMAND = Command(
    'data get',
    'download the published files of a task, and check them',
    add_arguments,
    run,
    ('remixer-t5x data get cogs', 'remixer-t5x data get snli --from ~/Downloads'),
    ON_CPU,
)
