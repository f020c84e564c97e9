"""`remixer-t5x fill_in`: corrupted examples of a split, and what a trained model puts into the gaps."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from remixer_t5x.checkpoints import saved_params
from remixer_t5x.data import pipeline
from remixer_t5x.devices import partition
from remixer_t5x.errors import UserError
from remixer_t5x.run_folder import model_dir

# Text around a gap that is shown; a whole example would fill the screen.
TOKENS_SHOWN = 80


def run(
    model: Any,
    dataset: pipeline.DatasetConfig,
    partitioner: partition.Partitioner,
    folder: str,
    num_examples: int = 3,
) -> None:
    """Prints the first examples of `dataset`, truncated, with the true and the predicted text of each gap.

    Args:
        model: the model that was trained.
        dataset: a span-corruption task and the split to take examples from.
        partitioner: where parameters go.
        folder: MODEL_DIR of the training run; its newest checkpoint is read.
        num_examples: how many examples.
    """
    vocab = pipeline.vocabulary(dataset)
    if not vocab.extra_ids:
        raise UserError('the vocabulary has no sentinels (extra_ids is 0): use a span-corruption task')
    abstract = saved_params.abstract_params(model, pipeline.batch_shapes(dataset), partitioner)
    params = saved_params.restore_params(folder, abstract, pipeline.vocabulary_record(vocab), setting='MODEL_DIR')
    batch = next(iter(pipeline.EvalBatches(dataset, limit=1)))
    length = dataset.task_feature_lengths['targets']
    with partitioner.activate():
        predict = jax.jit(lambda params, batch: model.predict(params, batch, length))
        predicted = np.asarray(predict(params, partitioner.shard_batch(batch)))
    console = Console(file=sys.stdout, highlight=False)
    for row in range(min(num_examples, dataset.batch_size)):
        show(console, vocab, batch['encoder_input_tokens'][row], batch['decoder_target_tokens'][row], predicted[row])
    console.print(f'from the newest checkpoint in {folder}/{model_dir.CHECKPOINTS}', style='dim')


def show(console: Console, vocab: Any, inputs: np.ndarray, targets: np.ndarray, predicted: np.ndarray) -> None:
    """Prints one example: its beginning with numbered gaps, then each gap's true and predicted text."""
    first_sentinel = vocab.vocab_size - 1
    last_sentinel = vocab.vocab_size - vocab.extra_ids
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
