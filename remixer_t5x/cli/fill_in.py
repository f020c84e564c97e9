"""`remixer-t5x fill_in`: corrupted examples of a split, and what a trained model puts into the gaps."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from remixer_t5x.cli import arguments
from remixer_t5x.cli.command import Command
from remixer_t5x.errors import UserError
from remixer_tasks.vocabulary import sentinels

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

# Text around a gap that is shown; a whole example would fill the screen.
TOKENS_SHOWN = 80
BATCH_SIZE = 32
_WORD = re.compile(r'[^\W\d]\w+')
# Of the training run's configuration, with what runs/pretrain.gin would give where it is not there.
_DATA = {'SEED': 0, 'PACK': False, 'USE_CACHED_TASKS': False, 'CACHE_DIR': None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_gin(parser)
    number = 'how many examples to show (default 3)'
    parser.add_argument('--num_examples', metavar='N', type=arguments.whole_number(1), default=3, help=number)


def run(args: argparse.Namespace) -> None:
    """Prints the first validation examples, truncated, with the true and the predicted text of each gap, and how many
    gaps of one word got a word.
    """
    macros = ('MODEL', 'PARTITIONER', 'MODEL_DIR', 'MIXTURE_OR_TASK_NAME', 'TASK_FEATURE_LENGTHS', *_DATA)
    model, partitioner, folder, mixture, lengths, *data = arguments.values(args, *macros, defaults=_DATA)
    import jax
    import numpy as np
    from rich.console import Console

    from remixer_t5x.checkpoints import saved_params
    from remixer_t5x.data import frames, pipeline, task_batches, task_vocabulary
    from remixer_t5x.devices import compiler_options
    from remixer_t5x.models import interface
    from remixer_t5x.run_folder import model_dir

    dataset = pipeline.DatasetConfig(mixture, lengths, BATCH_SIZE, 'validation', False, *data)
    vocab = pipeline.vocabulary(dataset)
    if not sentinels.of(vocab)[1]:
        raise UserError('the vocabulary has no sentinels; use a span-corruption task')
    interface.require_frame(model, frames.ENCODER_DECODER, 'fill_in')
    abstract = saved_params.abstract_params(model, pipeline.batch_shapes(dataset), partitioner)
    params = saved_params.restore_params(folder, abstract, task_vocabulary.record(vocab), setting='MODEL_DIR')
    batch = next(iter(task_batches.EvalBatches(dataset, limit=1)))
    with partitioner.activate():
        predict = jax.jit(
            lambda params, batch: model.predict(params, batch, lengths['targets']),
            compiler_options=compiler_options.for_decoding(),
        )
        predicted = np.asarray(predict(params, partitioner.shard_batch(batch)))
    console = Console(highlight=False)
    for row in range(min(args.num_examples, BATCH_SIZE)):
        show(console, vocab, batch['encoder_input_tokens'][row], batch['decoder_target_tokens'][row], predicted[row])
    gaps, one_word, same = one_word_gaps(vocab, batch['decoder_target_tokens'], predicted)
    console.print(f'of {gaps:,} gaps of one word, {one_word:,} got one word, and {same:,} the same')
    console.print(f'from the newest checkpoint in {folder}/{model_dir.CHECKPOINTS}', style='dim')


def show(console: Console, vocab: Any, inputs: np.ndarray, targets: np.ndarray, predicted: np.ndarray) -> None:
    """Prints one example: its beginning with numbered gaps, then each gap's true and predicted text."""
    from rich.text import Text

    first_sentinel, last_sentinel = sentinels.of(vocab)[0], sentinels.ordinary_ids(vocab)
    shown = inputs[:TOKENS_SHOWN]
    text, numbers = Text(), []
    for sentinel, ids in split_at_sentinels(shown, first_sentinel, last_sentinel):
        if sentinel is not None:
            numbers.append(sentinel)
            text.append(f' [{sentinel + 1}] ', style='bold')
        text.append(vocab.decode([int(i) for i in ids]))
    console.print(Text('text   ', style='dim') + text + Text(' ...'))
    truth = dict(split_at_sentinels(targets, first_sentinel, last_sentinel))
    guess = dict(split_at_sentinels(predicted, first_sentinel, last_sentinel))
    for number in numbers:
        line = Text(f'  [{number + 1}]  ', style='bold')
        line += Text(f'was {_quoted(vocab, truth.get(number))}', style='none')
        line += Text(f'   the model says {_quoted(vocab, guess.get(number))}')
        console.print(line)
    console.print()


def one_word_gaps(vocab: Any, targets: np.ndarray, predicted: np.ndarray) -> tuple[int, int, int]:
    """How many gaps have one word as their true text, in how many of those the predicted text is one word, and in how
    many it is the same word. Words are letters, digits and _, at least two, and do not begin with a digit.
    """
    first, last = sentinels.of(vocab)[0], sentinels.ordinary_ids(vocab)
    gaps = one_word = same = 0
    for row, guesses in zip(targets, predicted, strict=True):
        guess = dict(split_at_sentinels(guesses, first, last))
        for number, ids in split_at_sentinels(row, first, last):
            wanted = vocab.decode(ids).strip() if number is not None and ids else ''
            if not _WORD.fullmatch(wanted):
                continue
            found = vocab.decode(guess.get(number) or []).strip()
            gaps, one_word, same = gaps + 1, one_word + bool(_WORD.fullmatch(found)), same + (found == wanted)
    return gaps, one_word, same


def split_at_sentinels(
    ids: Iterable[int], first_sentinel: int, last_sentinel: int
) -> Iterator[tuple[int | None, list[int]]]:
    """(number of the sentinel before, ids up to the next), the number None before the first; stops at the end token."""
    number: int | None = None
    part: list[int] = []
    for token in ids:
        if token in (0, 1):
            break
        if last_sentinel <= token <= first_sentinel:
            yield number, part
            number, part = first_sentinel - int(token), []
        else:
            part.append(int(token))
    yield number, part


def _quoted(vocab: Any, ids: list[int] | None) -> str:
    return 'nothing' if not ids else f'"{vocab.decode(ids)}"'


COMMAND = Command(
    'fill_in',
    'corrupted examples, and what a trained model puts into the gaps',
    add_arguments,
    run,
    ('remixer-t5x fill_in --gin_file=experiments/python_docs.gin',),
    prints_result=True,
)
