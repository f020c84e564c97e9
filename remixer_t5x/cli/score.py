"""`remixer-t5x score`: computes log p(target | input) for each pair in a file, and writes JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from remixer_t5x.cli import arguments
from remixer_t5x.cli.arguments import Command
from remixer_t5x.errors import UserError, format_count

# Number of pairs per batch, and number of batches whose pairs are sorted by length together.
BATCH_SIZE, WINDOW_BATCHES = 32, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    path = 'a MODEL_DIR (its gin file is executed), a checkpoint, a Hugging Face folder, or hf://NAME'
    parser.add_argument('model', metavar='PATH', help=path)
    parser.add_argument('pairs', metavar='FILE', help='JSON lines, CSV, TSV or Parquet file with a pair in each row')
    column = "a column, or a template with columns in braces such as 'is {number} even?'"
    parser.add_argument('--inputs', metavar='COLUMN', default='inputs', help=f'{column} (default inputs)')
    parser.add_argument('--targets', metavar='COLUMN', default='targets', help=f'{column} (default targets)')
    output = 'a new JSON lines file (default: standard output)'
    parser.add_argument('--output', type=arguments.parse_local_path, metavar='FILE', help=output)
    size = f'pairs per batch (default {BATCH_SIZE})'
    parser.add_argument(
        '--batch_size', metavar='N', type=arguments.make_whole_number_type(1), default=BATCH_SIZE, help=size
    )
    lengths = 'maximum number of tokens of an input or a target (default: the lengths used in training)'
    parser.add_argument('--max_length', metavar='N', type=arguments.make_whole_number_type(1), help=lengths)


def run(args: argparse.Namespace) -> None:
    """Writes a JSON line with the score of each pair, in order, and prints mean log-likelihoods at the end."""
    from remixer_t5x.api import saved_models

    pairs = _read_pairs(args)
    first = list(itertools.islice(pairs, 1))
    lengths = None if args.max_length is None else dict.fromkeys(('inputs', 'targets'), args.max_length)
    trained = saved_models.load(args.model, lengths=lengths)
    trained = dataclasses.replace(trained, batch_size=args.batch_size)
    total = _write_scores(args, _score_pairs(trained, itertools.chain(first, pairs), args.batch_size * WINDOW_BATCHES))
    print(total, file=sys.stderr)


def _read_pairs(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    from remixer_tasks.files import row_files
    from remixer_tasks.files.text_lines import BadRecords
    from remixer_tasks.text_pairs import TextTemplate

    templates = TextTemplate(args.inputs, '--inputs'), TextTemplate(args.targets, '--targets')
    numbered = all(template.has_numbered_columns for template in templates)
    path = os.path.expanduser(args.pairs)
    # Malformed rows raise an error, because skipping a row would change the index of all later rows.
    malformed = BadRecords(strict=True, line_advice='correct or remove the row')
    layout = row_files.RowLayout(row_files.choose_format(path, None, row_files.EXTENSIONS, ''), numbered=numbered)
    for number, row in row_files.read_rows(path, layout, malformed):
        try:
            yield templates[0].fill_from_row(row), templates[1].fill_from_row(row)
        except ValueError as error:
            raise UserError(f'{args.pairs} row {number}: {error}; every row must have an input and a target') from error


def _score_pairs(trained: Any, pairs: Iterable[tuple[str, str]], window: int) -> Iterator[dict[str, Any]]:
    rest, first = iter(pairs), 0
    while chunk := list(itertools.islice(rest, window)):
        inputs = [_encode_text(trained, text, 'inputs', index) for index, (text, _) in enumerate(chunk, first)]
        targets = [_encode_text(trained, text, 'targets', index) for index, (_, text) in enumerate(chunk, first)]
        scores = trained.score_ids(inputs, targets)
        for index, ((text, target), ids, score) in enumerate(zip(chunk, targets, scores, strict=True), first):
            yield {'index': index, 'input': text, 'target': target, 'score': float(score), 'tokens': len(ids)}
        first += len(chunk)


def _encode_text(trained: Any, text: str, side: str, index: int) -> list[int]:
    """Returns the token ids of an input or a target. Raises UserError if there are too many."""
    ids, _ = dataclasses.replace(trained.build_codec(side), longest=sys.maxsize).encode(text, index)
    if len(ids) > trained.lengths[side]:
        raise UserError(
            f'{side} of the pair with index {index} must have at most {trained.lengths[side]} tokens, got {len(ids)}; '
            f'shorten the text, or pass --max_length={max(len(ids), *trained.lengths.values())}'
        )
    return ids


@contextlib.contextmanager
def _open_output(output: str | None) -> Iterator[TextIO]:
    """Creates the output file, and removes it after an error, because the next run would refuse it.

    If `output` is None, yields the standard output.
    """
    if output is None:
        yield sys.stdout
        return
    path = os.path.abspath(os.path.expanduser(output))
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = stack.enter_context(open(path, 'x', encoding='utf-8'))
        except OSError as error:
            raise UserError(f'{output} cannot be written ({error.strerror}); use another --output') from None
        try:
            yield file
        except BaseException:
            os.remove(path)
            raise


def _write_scores(args: argparse.Namespace, rows: Iterable[dict[str, Any]]) -> str:
    from remixer_t5x.run_folder import metrics

    count, tokens, total = 0, 0, 0.0
    with _open_output(args.output) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + '\n')
            count, tokens, total = count + 1, tokens + row['tokens'], total + row['score']
    if not count:
        return '0 pairs'
    per_token = total / tokens if tokens else math.nan
    return (
        f'{format_count(count, "pair")}, {format_count(tokens, "target token")}: log-likelihood '
        f'{total / count:.4f} per pair, {per_token:.4f} per token, perplexity {metrics.perplexity(-per_token):.4g}'
    )


COMMAND = Command(
    'score',
    'compute log p(target | input) of each pair in a file, and write JSON lines',
    add_arguments,
    run,
    (
        'remixer-t5x score runs/mine pairs.jsonl --inputs=question --targets=answer --output=scores.jsonl',
        "remixer-t5x score hf://google/flan-t5-small rows.csv --inputs='is {number} even?' --targets=answer",
    ),
    keeps_buffers=True,
    prints_result=True,
)
