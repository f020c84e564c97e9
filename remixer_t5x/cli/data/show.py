"""`remixer-t5x data show NAME`: examples of a task as its data set has them, and as the text that a model sees."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from remixer_t5x.cli import arguments
from remixer_t5x.cli.command import ON_CPU, Command
from remixer_t5x.cli.data.list import DATA_DIR_HELP

if TYPE_CHECKING:
    from remixer_tasks.catalogue import ShownExample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('name', metavar='NAME', help='a task, as `data list` names them')
    parser.add_argument('--split', metavar='NAME', help='which split to read (default: the first that is here)')
    number = 'how many examples to show (default 2)'
    parser.add_argument('--num_examples', metavar='N', type=arguments.whole_number(1), default=2, help=number)
    parser.add_argument('--data_dir', metavar='DIR', help=DATA_DIR_HELP)


def run(args: argparse.Namespace) -> None:
    """Prints the first examples of a split, in the order of the data.

    Raises:
        UserError: an unknown name or split, or missing data.
    """
    with arguments.libraries(args):
        from remixer_tasks import catalogue
    split, shown = catalogue.examples(args.name, args.split, args.num_examples, args.data_dir)
    print(f'{args.name}, split {split}')
    for number, example in enumerate(shown, 1):
        print('', f'example {number}', *_lines(example), sep='\n')


def _lines(example: ShownExample) -> list[str]:
    width = max(len(field) for field in (*example.raw, 'targets'))
    lines = [f'  {field:<{width}}  {json.dumps(value, ensure_ascii=False)}' for field, value in example.raw.items()]
    for inputs, targets in example.texts:
        lines += [f'  {"inputs":<{width}}→ {inputs}', f'  {"targets":<{width}}→ {targets}']
    return lines if example.texts else [*lines, '  the task leaves this example out']


COMMAND = Command(
    'data show',
    'examples of a task as published, and as text to text',
    add_arguments,
    run,
    ('remixer-t5x data show super_glue_cb_v102 --split=validation --num_examples=1',),
    ON_CPU,
    prints_result=True,
)
