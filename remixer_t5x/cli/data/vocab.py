"""`remixer-t5x vocab`: prints the size and special ids of a vocabulary, and the pieces of a text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from remixer_t5x.cli import arguments
from remixer_t5x.cli.command import ON_CPU, Command
from remixer_tasks.vocabulary import sentinels

if TYPE_CHECKING:
    import seqio

TEXT = 'Thank you for inviting me to your party last week.'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    parser.add_argument('--text', metavar='WORDS', default=TEXT, help='text to split into pieces')


def run(args: argparse.Namespace) -> None:
    """Prints the size and special ids of the vocabulary, and the ids and pieces of the text.

    Raises UserError if the tokenizer model of the vocabulary cannot be read or trained.
    """
    (vocabulary,) = arguments.load_values(args, 'VOCABULARY')
    first, count = sentinels.sentinel_range(vocabulary)
    print(f'ids          {vocabulary.vocab_size} (VOCAB_SIZE must be at least this)')
    print(f'padding {vocabulary.pad_id}, EOS {vocabulary.eos_id}, unknown {vocabulary.unk_id}')
    sentinel_ids = f': <extra_id_0> is {first}, <extra_id_{count - 1}> is {first + 1 - count}'
    print(f'sentinels    {count}{sentinel_ids if count else ", span corruption needs some"}')
    if model := getattr(vocabulary, 'sentencepiece_model_file', None):
        print(f'model        {model}')
    if args.text:
        ids = [int(token) for token in vocabulary.encode(args.text)]
        print(f'text         {args.text}\n{len(ids)} tokens')
        for token in ids:
            print(f'  {token:>6}  {decode_piece(vocabulary, token)}')


def decode_piece(vocabulary: seqio.Vocabulary, token: int) -> str:
    """Returns the SentencePiece piece of an id with its word-start marker, or the decoded id if it has no piece."""
    tokenizer = getattr(vocabulary, 'tokenizer', None)
    if tokenizer is not None and token < tokenizer.GetPieceSize():
        return tokenizer.IdToPiece(token)
    return repr(vocabulary.decode([token]))


COMMAND = Command(
    'vocab',
    'show the size, special ids and pieces of a vocabulary',
    add_arguments,
    run,
    ("remixer-t5x vocab --gin_file=data/python_docs.gin --text='A list of numbers.'",),
    ON_CPU,
    prints_result=True,
)
