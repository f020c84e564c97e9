"""`remixer-t5x report`: writes an HTML report about runs."""

import argparse

from remixer_t5x.cli import arguments
from remixer_t5x.cli.arguments import ON_CPU, Command
from remixer_t5x.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('folders', nargs='+', metavar='MODEL_DIR', help='folders of runs')
    out = 'output HTML file (default report.html)'
    parser.add_argument('--out', type=arguments.parse_local_path, metavar='FILE', default='report.html', help=out)
    pictures = 'draw what the models learned; executes the config.gin of each run and takes about a minute per run'
    parser.add_argument('--pictures', action='store_true', help=pictures)
    text = 'input text for the pictures (default: a short sentence)'
    parser.add_argument('--text', metavar='WORDS', help=text)
    pictures_dir = 'also write each picture as PNG and SVG to this folder'
    parser.add_argument('--pictures_dir', type=arguments.parse_local_path, metavar='DIR', help=pictures_dir)


def run(args: argparse.Namespace) -> None:
    """Writes the report and prints its path."""
    for flag in ('text', 'pictures_dir'):
        if getattr(args, flag) and not args.pictures:
            raise UserError(f'--{flag} requires --pictures, which runs the gin code in each config.gin; add --pictures')
    from remixer_t5x.extras.reports import report_writer

    report_writer.write_report(
        args.folders, args.out, args.text or report_writer.DEFAULT_TEXT, args.pictures, args.pictures_dir
    )


COMMAND = Command(
    'report',
    'write one HTML file about runs: curves, tasks, predictions, settings, and pictures of what was learned',
    add_arguments,
    run,
    (
        'remixer-t5x report runs/quickstart',
        "remixer-t5x report runs/remixer runs/t5 --out=compared.html --pictures --text='What does it look at?'",
    ),
    # The report uses the CPU, because a run that is still training may occupy the accelerator.
    ON_CPU,
)
