"""`remixer-t5x fill_in`: shows how a trained model fills the gaps in corrupted examples."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from remixer_t5x import base_vocabulary
from remixer_t5x.cli import arguments
from remixer_t5x.cli.arguments import Command
from remixer_t5x.errors import UserError

# Maximum number of tokens to show per example, because whole examples do not fit on the screen.
TOKENS_SHOWN = 80
BATCH_SIZE = 32
# Macros that configure the training data, and their defaults.
_DATA = {'SEED': 0, 'USE_CACHED_TASKS': False, 'CACHE_DIR': None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin_flags(parser)
    number = f'number of examples to show, at most {BATCH_SIZE} (default 3)'
    parser.add_argument('--num_examples', metavar='N', type=arguments.make_whole_number_type(1), default=3, help=number)


def run(args: argparse.Namespace) -> None:
    """Prints the beginning of the first validation examples, with the true and predicted text of each gap."""
    macros = ('MODEL', 'PARTITIONER', 'MODEL_DIR', 'MIXTURE_OR_TASK_NAME', 'TASK_FEATURE_LENGTHS', *_DATA)
    model, partitioner, folder, mixture, lengths, seed, use_cached, cache_dir = arguments.load_macro_values(
        args, *macros, defaults=_DATA
    )
    from remixer_t5x.checkpoints import saved_params
    from remixer_t5x.data import batch_formats, pipeline, task_batches, task_vocabulary
    from remixer_t5x.evaluate import predictions
    from remixer_t5x.models import interface
    from remixer_t5x.run_folder import model_dir

    dataset = pipeline.DatasetConfig(
        mixture, lengths, BATCH_SIZE, 'validation', False, seed, use_cached=use_cached, cache_dir=cache_dir
    )
    vocab = pipeline.get_vocabulary(dataset)
    if not base_vocabulary.find_sentinel_range(vocab)[1]:
        raise UserError('the vocabulary has no sentinels; use a span-corruption task')
    interface.require_model_type(model, batch_formats.ENCODER_DECODER, 'fill_in')
    abstract = saved_params.get_abstract_params(model, pipeline.get_batch_shapes(dataset), partitioner)
    params = saved_params.restore_params(
        folder, abstract, task_vocabulary.get_vocabulary_record(vocab), setting='MODEL_DIR'
    )
    batch = next(iter(task_batches.EvalBatches(dataset, limit=1)))
    inputs = [row for row in batch['encoder_input_tokens'][: args.num_examples] if row.any()]
    decoding = predictions.Decoding(BATCH_SIZE, lengths)
    answers = predictions.Predictor(model, partitioner, decoding, vocab).predict(params, inputs)
    for row, (ids, answer) in enumerate(zip(inputs, answers, strict=True)):
        print_filled_gaps(vocab, ids, batch['decoder_target_tokens'][row], answer.ids[0])
    print(f'from the newest checkpoint in {folder}/{model_dir.CHECKPOINTS}')


def print_filled_gaps(vocab: Any, inputs: Sequence[int], targets: Iterable[int], predicted: Iterable[int]) -> None:
    """Prints the beginning of an example with numbered gaps, followed by the true and predicted text of each gap."""
    parts = list(split_at_sentinels(inputs[:TOKENS_SHOWN], vocab))
    text = ''.join(words if number is None else f' [{number + 1}] {words}' for number, words in parts)
    print(f'text   {text} ...')
    truth, guess = (dict(split_at_sentinels(ids, vocab)) for ids in (targets, predicted))
    for number, _ in parts:
        if number is not None:
            was, says = (f'"{words}"' if words else 'nothing' for words in (truth.get(number), guess.get(number)))
            print(f'  [{number + 1}]  was {was}   the model says {says}')
    print()


def split_at_sentinels(ids: Iterable[int], vocab: Any) -> Iterator[tuple[int | None, str]]:
    """Yields each sentinel's number (None before the first sentinel) and the text after it, up to the end token."""
    first_sentinel, count = base_vocabulary.find_sentinel_range(vocab)
    number: int | None = None
    part: list[int] = []
    for token in ids:
        if token in (vocab.pad_id, vocab.eos_id):
            break
        if first_sentinel - count < token <= first_sentinel:
            yield number, vocab.decode(part)
            number, part = first_sentinel - int(token), []
        else:
            part.append(int(token))
    yield number, vocab.decode(part)


COMMAND = Command(
    'fill_in',
    'show corrupted examples, and how a trained model fills the gaps',
    add_arguments,
    run,
    ('remixer-t5x fill_in --gin_file=experiments/python_docs.gin',),
    prints_result=True,
)
