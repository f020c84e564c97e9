"""Implements `remixer-t5x data list`, `data get NAME` and `data show NAME` for labeled tasks."""

import argparse
import json
import os

from remixer_t5x.cli import arguments, console
from remixer_t5x.cli.command import ON_CPU, Command

# Wide enough that paths are not wrapped if the output is a file.
_PIPE_WIDTH = 1000
_DATA_DIR_HELP = 'search only this folder (default: TFDS_DATA_DIR, then REMIXER_T5X_DATA, then downloads)'


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--data_dir', metavar='DIR', help=_DATA_DIR_HELP)


def list_tasks(args: argparse.Namespace) -> None:
    """Prints a table row for each task, with its splits and the path of its data if it has been downloaded."""
    with arguments.hide_library_output(args):
        from remixer_tasks import catalogue
    tasks = catalogue.read_statuses(args.data_dir)
    table = console.build_table('task', 'available', 'missing', 'location', wraps=True)
    for task in tasks:
        available = [split for split in task.splits if split.origin]
        # Shows the folders of the task's files, or the command that downloads the files.
        paths = [path for split in available for path in (split.origin or '').split(', ')]
        location = ', '.join(sorted({path if os.path.isdir(path) else os.path.dirname(path) for path in paths}))
        get_task = f'data get {task.name}'
        advice = f'remixer-t5x {get_task}' if task.has_download else f'no download, see {get_task}'
        amounts = ' · '.join(f'{split.name} {split.amount}'.strip() for split in available)
        table.add_row(task.name, amounts, ', '.join(s.name for s in task.splits if not s.origin), location or advice)
    whole = sum(all(split.origin for split in task.splits) for task in tasks)
    summary = f'{whole} of {len(tasks)} tasks are available; downloads go to {catalogue.download_folder(args.data_dir)}'
    corpora = 'Corpora for pretraining are gin files: data/python_docs.gin, data/own_text.gin, data/c4.gin'
    console.print_items(table, summary, corpora, pipe_width=_PIPE_WIDTH)


def add_get_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('name', metavar='NAME', help='a task or data set listed by `data list`')
    source = 'copy the published files from this folder instead of downloading them'
    parser.add_argument('--from', dest='source', metavar='DIR', help=source)
    folder = 'folder for the files (default: REMIXER_T5X_CACHE/data, or ~/.cache/remixer_t5x/data)'
    parser.add_argument('--data_dir', metavar='DIR', help=folder)


def download_task_files(args: argparse.Namespace) -> None:
    """Downloads and verifies the published files of a task, and prints their paths."""
    with arguments.hide_library_output(args):
        from remixer_tasks.files import download
    print('\n'.join(download.download_files(args.name, args.source, args.data_dir)))


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('name', metavar='NAME', help='a task listed by `data list`')
    parser.add_argument('--split', metavar='NAME', help='split to read (default: the first with data)')
    number = 'number of examples to show (default 2)'
    parser.add_argument('--num_examples', metavar='N', type=arguments.whole_number_type(1), default=2, help=number)
    parser.add_argument('--data_dir', metavar='DIR', help=_DATA_DIR_HELP)


def show_examples(args: argparse.Namespace) -> None:
    """Prints the first examples of a split, in the order of the data files."""
    with arguments.hide_library_output(args):
        from remixer_tasks import catalogue
    split, examples = catalogue.read_examples(args.name, args.split, args.num_examples, args.data_dir)
    print(f'{args.name}, split {split}')
    for number, example in enumerate(examples, 1):
        print(f'\nexample {number}')
        width = max(len(field) for field in (*example.raw, 'targets'))
        for field, value in example.raw.items():
            print(f'  {field:<{width}}  {json.dumps(value, ensure_ascii=False)}')
        for inputs, targets in example.texts:
            print(f'  {"inputs":<{width}}→ {inputs}\n  {"targets":<{width}}→ {targets}')
        if not example.texts:
            print('  the task excludes this example')


LIST = Command(
    'data list',
    'list labelled tasks, their splits, and whether their data is available',
    add_list_arguments,
    list_tasks,
    ('remixer-t5x data list',),
    ON_CPU,
    prints_result=True,
)
GET = Command(
    'data get',
    'download and verify the published files of a task',
    add_get_arguments,
    download_task_files,
    ('remixer-t5x data get cogs', 'remixer-t5x data get snli --from ~/Downloads'),
    ON_CPU,
)
SHOW = Command(
    'data show',
    'show examples of a task as published, and as inputs and targets',
    add_show_arguments,
    show_examples,
    ('remixer-t5x data show super_glue_cb_v102 --split=validation --num_examples=1',),
    ON_CPU,
    prints_result=True,
)
