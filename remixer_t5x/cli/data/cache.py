"""`remixer-t5x data cache`: tokenizes the examples of a task once, and caches them for `USE_CACHED_TASKS = True`."""

import argparse
import os
import shlex

from remixer_t5x.cli import arguments
from remixer_t5x.cli.command import ON_CPU, Command
from remixer_t5x.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    folder = 'folder for cached tasks, local or in gs://, with a subfolder for each task (default: CACHE_DIR)'
    parser.add_argument('--output_dir', metavar='DIR', help=folder)
    shards = 'number of files per split, at least the number of source files; hosts share the files (default 64)'
    parser.add_argument('--shards', metavar='N', type=arguments.whole_number_type(1), default=64, help=shards)
    parser.add_argument(
        '--beam_options',
        metavar='FLAGS',
        help="Beam's pipeline options, as in '--runner=DataflowRunner --project=...' (default: this process, with all "
        'examples in memory)',
    )


def run(args: argparse.Namespace) -> None:
    """Caches each task of a mixture and prints a summary."""
    mixture, folder = arguments.load_values(args, 'MIXTURE_OR_TASK_NAME', 'CACHE_DIR', defaults={'CACHE_DIR': None})
    folder = args.output_dir or folder
    if not isinstance(folder, str) or not folder:
        raise UserError(f'CACHE_DIR must be a folder, got {folder!r}; pass, for example, --output_dir=/data/cached')
    from remixer_t5x.data import pipeline, task_vocabulary
    from remixer_t5x.lazy import seqio
    from remixer_tasks import caching

    for task in seqio.get_subtasks(pipeline.get_task(mixture)):
        vocabulary = task_vocabulary.vocabulary_record(task.output_features['targets'].vocabulary)
        note = pipeline.format_cache_record(vocabulary)
        lines = caching.cache_task(task, os.path.expanduser(folder), note, args.shards, args.beam_options)
        print('\n'.join(lines), flush=True)
    print(f'to train with the cache: --gin.USE_CACHED_TASKS=True --gin.CACHE_DIR={shlex.quote(folder)}')


COMMAND = Command(
    'data cache',
    "cache a task's tokenized examples for training, with Apache Beam",
    add_arguments,
    run,
    ('remixer-t5x data cache --gin_file=data/c4.gin --output_dir=/data/cached',),
    ON_CPU,
)
