"""Segments of a text, damaged by T5's span corruption, as rows to train on and rows that are held out."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from library.rows import Rows, encoder_decoder
from remixer_t5x import tf_data
from remixer_t5x.errors import UserError

HELD_OUT_ROWS = 512


@functools.cache
def data_of(text: str, length: int, vocabulary: int, rows: int) -> tuple[Rows, Rows]:
    """Whole segments to train on, at most `rows`, and held-out ones.

    Args:
        text: path or glob of JSON lines files with a `text` field.
        length: number of input tokens.
        vocabulary: size of the SentencePiece vocabulary that is trained on the text.
    """
    from remixer_tasks import pretraining

    corpus, pieces = corpus_of(text, vocabulary)
    task = pretraining.span_corruption(corpus, pieces)
    return segments(task, 'train', length, rows), segments(task, 'validation', length, HELD_OUT_ROWS)


def corpus_of(text: str, vocabulary: int) -> tuple[Any, Any]:
    """The text, and the vocabulary that is trained on it."""
    from remixer_tasks import local_files, vocabularies

    corpus = local_files.corpus(text, format='jsonl')
    return corpus, vocabularies.trained(corpus, vocabulary)


def examples(task: Any, split: str, lengths: Mapping[str, int], limit: int) -> Iterator[dict[str, np.ndarray]]:
    """The first `limit` examples, damaged in the same way in every process: seqio's noise has a seed here."""
    dataset = task.get_dataset(lengths, split=split, shuffle=False, seed=0, num_epochs=1)
    return tf_data.arrays(dataset.take(limit))


def segments(task: Any, split: str, length: int, limit: int) -> Rows:
    """Rows of exactly `length` inputs and their targets. Raises UserError where the text has none."""
    found = [row for row in examples(task, split, target_lengths(length), limit) if len(row['inputs']) == length]
    if not found:
        raise UserError(f'the {split} split has no segment of {length} tokens: give more text, or a smaller --length')
    inputs, targets = (np.stack([row[name] for row in found]).astype(np.int32) for name in ('inputs', 'targets'))
    return encoder_decoder(inputs, targets)


def target_lengths(length: int) -> dict[str, int]:
    """The tokens of inputs and of the targets that belong to them."""
    from remixer_tasks.objectives import span_corruption as spans

    noise = spans.Noise()
    return {'inputs': length, 'targets': noise.lengths(spans.segment_length(length, length, noise))[1]}
