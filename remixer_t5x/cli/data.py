"""Implements the commands `remixer-t5x data`, `data list`, `data get`, `data show`, `data cache` and `vocab`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from remixer_t5x import base_vocabulary
from remixer_t5x.cli import arguments, console
from remixer_t5x.cli.arguments import ON_CPU, Command
from remixer_t5x.errors import UserError, format_count

if TYPE_CHECKING:
    import numpy as np
    import seqio

# Number of rows used to measure the packing efficiency.
MEASURED_ROWS = 300
# Defaults of the macros that `data` reads only if a gin file or flag sets them.
_PREVIEW_DEFAULTS = {'PACK': False, 'LABELS': None, 'DOC_STRIDE': None}
# Maps 'inputs' and 'targets' to the names of their token and segment arrays in a batch.
_SIDES = {
    'inputs': ('encoder_input_tokens', 'encoder_segment_ids'),
    'targets': ('decoder_target_tokens', 'decoder_segment_ids'),
}
# Array of the tokens that encoder-only models predict in place; 0 marks positions without a prediction.
_IN_PLACE = 'encoder_target_tokens'
# Width of a table in a file or pipe, at which paths are not wrapped.
_PIPE_WIDTH = 1000
_DATA_DIR_HELP = 'search only this folder (default: TFDS_DATA_DIR, then REMIXER_T5X_DATA, then downloads)'
DEFAULT_TEXT = 'Thank you for inviting me to your party last week.'


def add_preview_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    parser.add_argument('--split', metavar='NAME', default='train', help="split to read (default 'train')")
    number = 'number of examples to show (default 2)'
    parser.add_argument('--num_examples', metavar='N', type=arguments.make_whole_number_type(0), default=2, help=number)


def preview_task(args: argparse.Namespace) -> None:
    """Prints rows of the shuffled split in the format of training batches, and the packing efficiency."""
    macros = ('MIXTURE_OR_TASK_NAME', 'TASK_FEATURE_LENGTHS', 'MODEL_TYPE', *_PREVIEW_DEFAULTS)
    mixture, lengths, model_type, pack, labels, stride = arguments.load_macro_values(
        args, *macros, defaults=_PREVIEW_DEFAULTS
    )
    from remixer_t5x import tf_data
    from remixer_t5x.data import batch_formats, pipeline, resumable_iterator, task_batches

    if isinstance(lengths, Mapping) and set(lengths) == {'targets'}:
        # Without a model type, tasks without inputs are shown in the format of decoder-only models.
        model_type = batch_formats.DECODER_ONLY
    config = pipeline.DatasetConfig(
        mixture,
        lengths,
        batch_size=1,
        split=args.split,
        pack=pack,
        model_type=model_type,
        labels=labels,
        doc_stride=stride,
    )
    task = pipeline.get_configured_task(config)
    with resumable_iterator.wrap_task_errors(task.name):
        dataset = task_batches.open_examples(task, config, None, epochs=1)
        rows = list(itertools.islice(tf_data.iterate_as_numpy(dataset), max(MEASURED_ROWS, args.num_examples)))
    if not rows:
        raise UserError(f'{task.name} has no examples in split {args.split!r}; choose another with --split')
    vocabulary = task.output_features['targets'].vocabulary
    print(f'{task.name}, split {args.split}, {"packed" if pack else "one example per row"}')
    for number, row in enumerate(rows[: args.num_examples], 1):
        print(f'\nrow {number}')
        _print_batch_row(row, vocabulary)
    print('', *describe_packing_efficiency(rows), sep='\n')


def describe_packing_efficiency(rows: Iterable[Mapping[str, np.ndarray]]) -> list[str]:
    """Describes the fraction of non-padding tokens and the examples per row, separately for inputs and targets."""
    import numpy as np

    rows = list(rows)
    lines = []
    for side, (tokens, segments) in _SIDES.items():
        if tokens not in rows[0]:
            continue
        slots = sum(row[tokens].size for row in rows)
        real = sum(int(np.count_nonzero(row[tokens])) for row in rows)
        examples = sum(int(row[segments].max()) if segments in row else 1 for row in rows)
        lines.append(
            f'{side}: {real / slots:.1%} of {slots // len(rows)} slots are tokens, '
            f'{examples / len(rows):.2f} examples per row ({format_count(len(rows), "row")} measured)'
        )
    return lines


def _print_batch_row(row: Mapping[str, np.ndarray], vocabulary: seqio.Vocabulary) -> None:
    for side, (tokens, segments) in _SIDES.items():
        if tokens not in row:
            continue
        examples = row[segments] if segments in row else (row[tokens] != 0).astype('int32')
        for example in range(1, int(examples.max()) + 1):
            is_in_example = examples == example
            if 'decoder_causal_attention' in row:
                # For prefix language models, the inputs are the tokens whose loss weight is 0.
                weights = row['decoder_loss_weights']
                _print_tokens('inputs', row[tokens][is_in_example & (weights == 0)], vocabulary)
                is_in_example &= weights > 0
            _print_tokens(side, row[tokens][is_in_example], vocabulary)
    if _IN_PLACE in row:
        tokens_and_targets = zip(row['encoder_input_tokens'].tolist(), row[_IN_PLACE].tolist(), strict=True)
        pairs = [
            f'{decode_ids([token], vocabulary)} → {decode_ids([target], vocabulary)}'
            for token, target in tokens_and_targets
            if target
        ]
        print(f'  targets, {format_count(len(pairs), "token")}, at their positions: {" · ".join(pairs)}')


def _print_tokens(side: str, tokens: np.ndarray, vocabulary: seqio.Vocabulary) -> None:
    ids = [int(token) for token in tokens]
    print(f'  {side}, {format_count(len(ids), "token")}: {decode_ids(ids, vocabulary)}')
    print(f'    ids: {" ".join(map(str, ids))}')


def decode_ids(ids: list[int], vocabulary: seqio.Vocabulary) -> str:
    """Decodes token ids to text that shows sentinels as <extra_id_0>, <extra_id_1>, ... and the end token as </s>."""
    ordinary = base_vocabulary.count_ordinary_ids(vocabulary)
    parts = []
    for is_special, group in itertools.groupby(ids, lambda token: token >= ordinary or token == vocabulary.eos_id):
        if not is_special:
            # `seqio.PassThroughVocabulary.decode` returns ids instead of text.
            parts.append(str(vocabulary.decode(list(group))))
            continue
        parts += [
            '</s>' if token == vocabulary.eos_id else f'<extra_id_{vocabulary.vocab_size - 1 - token}>'
            for token in group
        ]
    return ' '.join(parts)


PREVIEW = Command(
    'data',
    'show the first examples of a task as text and as ids, and the packing efficiency',
    add_preview_arguments,
    preview_task,
    (
        'remixer-t5x data --gin_file=data/python_docs.gin --num_examples=1',
        'remixer-t5x data --gin_file=data/python_docs.gin --gin_file=objectives/ul2.gin',
    ),
    ON_CPU,
    prints_result=True,
)


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--data_dir', metavar='DIR', help=_DATA_DIR_HELP)


def list_tasks(args: argparse.Namespace) -> None:
    """Prints a table of the tasks, with the splits of each task and the path of its data if downloaded."""
    from remixer_tasks import catalogue

    table = console.build_table('task', 'available', 'missing', 'location', wraps=True)
    whole = 0
    for task in catalogue.TASKS.values():
        origins = catalogue.locate_splits(task.dataset, args.data_dir, task.splits)
        missing = [split for split, origin in origins.items() if not origin]
        whole += not missing
        available = [split for split in origins if split not in missing]
        # Shows the folders of the task's files, or the command that downloads the files.
        paths = [path for origin in origins.values() if origin for path in origin.split(', ')]
        location = ', '.join(sorted({path if os.path.isdir(path) else os.path.dirname(path) for path in paths}))
        get_task = f'data get {task.name}'
        advice = f'remixer-t5x {get_task}' if task.dataset.downloads else f'no download, see {get_task}'
        table.add_row(task.name, ', '.join(available), ', '.join(missing), location or advice)
    folder = catalogue.get_download_folder(args.data_dir)
    summary = f'{whole} of {len(catalogue.TASKS)} tasks are available; downloads go to {folder}'
    corpora = 'Each corpus for pretraining has a gin file, such as data/own_text.gin or data/huggingface.gin'
    console.print_with_rich(table, summary, corpora, pipe_width=_PIPE_WIDTH)


def add_get_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('name', metavar='NAME', help='a task or dataset listed by `data list`')
    source = 'copy the published files from this folder instead of downloading them'
    parser.add_argument('--from', dest='source', metavar='DIR', help=source)
    folder = 'folder for the files (default: REMIXER_T5X_CACHE/data, or ~/.cache/remixer_t5x/data)'
    parser.add_argument('--data_dir', metavar='DIR', help=folder)


def download_task_files(args: argparse.Namespace) -> None:
    """Downloads and verifies the published files of a task, and prints their paths."""
    from remixer_tasks.files import download

    print('\n'.join(download.download_files(args.name, args.source, args.data_dir)))


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('name', metavar='NAME', help='a task listed by `data list`')
    parser.add_argument('--split', metavar='NAME', help='split to read (default: the first with data)')
    number = 'number of examples to show (default 2)'
    parser.add_argument('--num_examples', metavar='N', type=arguments.make_whole_number_type(1), default=2, help=number)
    parser.add_argument('--data_dir', metavar='DIR', help=_DATA_DIR_HELP)


def show_examples(args: argparse.Namespace) -> None:
    """Prints the first examples of a split, in the order of the data files."""
    from remixer_tasks import catalogue

    split, examples = catalogue.read_examples(args.name, args.split, args.num_examples, args.data_dir)
    print(f'{args.name}, split {split}')
    for number, (row, texts) in enumerate(examples, 1):
        print(f'\nexample {number}')
        width = max(len(field) for field in (*row, 'targets'))
        for field, value in row.items():
            print(f'  {field:<{width}}  {json.dumps(value, ensure_ascii=False)}')
        for inputs, targets in texts:
            print(f'  {"inputs":<{width}} → {inputs}\n  {"targets":<{width}} → {targets}')
        if not texts:
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


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    folder = 'folder for cached tasks, local or in gs://, with a subfolder for each task (default: CACHE_DIR)'
    parser.add_argument('--output_dir', metavar='DIR', help=folder)
    shards = 'number of files per split, at least the number of source files; hosts share the files (default 64)'
    parser.add_argument('--shards', metavar='N', type=arguments.make_whole_number_type(1), default=64, help=shards)
    parser.add_argument(
        '--beam_options',
        metavar='FLAGS',
        help="Beam's pipeline options, as in '--runner=DataflowRunner --project=...' (default: this process, with all "
        'examples in memory)',
    )


def cache_tasks(args: argparse.Namespace) -> None:
    """Caches each task of a mixture and prints a summary."""
    mixture, folder = arguments.load_macro_values(
        args, 'MIXTURE_OR_TASK_NAME', 'CACHE_DIR', defaults={'CACHE_DIR': None}
    )
    folder = args.output_dir or folder
    if not isinstance(folder, str) or not folder:
        raise UserError(f'CACHE_DIR must be a folder, got {folder!r}; pass, for example, --output_dir=/data/cached')
    from remixer_t5x.data import pipeline, task_vocabulary
    from remixer_t5x.lazy_imports import seqio
    from remixer_tasks import caching

    for task in seqio.get_subtasks(pipeline.get_task(mixture)):
        vocabulary = task_vocabulary.get_vocabulary_record(task.output_features['targets'].vocabulary)
        note = pipeline.format_cache_record(vocabulary)
        summary = caching.cache_task(task, os.path.expanduser(folder), note, args.shards, args.beam_options)
        print(summary, flush=True)
    print(f'to train with the cache: --gin.USE_CACHED_TASKS=True --gin.CACHE_DIR={shlex.quote(folder)}')


CACHE = Command(
    'data cache',
    "cache a task's tokenized examples for training, with Apache Beam",
    add_cache_arguments,
    cache_tasks,
    ('remixer-t5x data cache --gin_file=data/c4.gin --output_dir=/data/cached',),
    ON_CPU,
)


def add_vocabulary_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    parser.add_argument('--text', metavar='WORDS', default=DEFAULT_TEXT, help='text to split into pieces')


def show_vocabulary(args: argparse.Namespace) -> None:
    """Prints the size and special ids of the vocabulary, and the ids and pieces of the text.

    Raises UserError if the tokenizer model of the vocabulary cannot be read or trained.
    """
    (vocabulary,) = arguments.load_macro_values(args, 'VOCABULARY')
    first, count = base_vocabulary.find_sentinel_range(vocabulary)
    print(f'ids          {vocabulary.vocab_size} (VOCAB_SIZE must be at least this)')
    print(f'padding {vocabulary.pad_id}, EOS {vocabulary.eos_id}, unknown {vocabulary.unk_id}')
    sentinel_ids = f': <extra_id_0> is {first}, <extra_id_{count - 1}> is {first + 1 - count}'
    print(f'sentinels    {count}{sentinel_ids if count else "; span corruption requires sentinels"}')
    if model := getattr(vocabulary, 'sentencepiece_model_file', None):
        print(f'model        {model}')
    if args.text:
        ids = [int(token) for token in vocabulary.encode(args.text)]
        print(f'text         {args.text}\n{format_count(len(ids), "token")}')
        for token in ids:
            print(f'  {token:>6}  {decode_piece(vocabulary, token)}')


def decode_piece(vocabulary: seqio.Vocabulary, token: int) -> str:
    """Returns the SentencePiece piece of an id with its word-start marker, or the decoded id if it has no piece."""
    tokenizer = getattr(vocabulary, 'tokenizer', None)
    if tokenizer is not None and token < tokenizer.GetPieceSize():
        return tokenizer.IdToPiece(token)
    is_sentinel = token >= base_vocabulary.count_ordinary_ids(vocabulary)
    return decode_ids([token], vocabulary) if is_sentinel else repr(vocabulary.decode([token]))


VOCABULARY = Command(
    'vocab',
    'show the size, special ids and pieces of a vocabulary',
    add_vocabulary_arguments,
    show_vocabulary,
    ("remixer-t5x vocab --gin_file=data/python_docs.gin --text='A list of numbers.'",),
    ON_CPU,
    prints_result=True,
)
