"""The vocabulary of a task: which one a model needs, its record in checkpoints, and whether its ids fit the model."""

from __future__ import annotations

import hashlib

from remixer_t5x.errors import UserError
from remixer_t5x.lazy import seqio


def of(source: seqio.Task | seqio.Mixture) -> seqio.Vocabulary:
    """The vocabulary of the targets. Raises UserError if inputs use another vocabulary, because the model has one
    table.
    """
    features = source.output_features
    targets = features['targets'].vocabulary
    if 'inputs' in features and features['inputs'].vocabulary != targets:
        raise UserError(
            f'{source.name} has one vocabulary for inputs and another for targets; '
            'the model has one table of embeddings: give both features the same vocabulary'
        )
    return targets


def fingerprint(vocab: seqio.Vocabulary) -> str:
    """16 hex digits that change if ids mean other text."""
    model = getattr(vocab, 'sp_model', None)
    # A vocabulary of words has no model file; its words define what ids mean.
    name = '\n'.join((type(vocab).__name__, *getattr(vocab, 'words', ())))
    text = model if isinstance(model, bytes) else name.encode()
    return hashlib.sha256(text + f'|{vocab.vocab_size}|{vocab.extra_ids}'.encode()).hexdigest()[:16]


def record(vocab: seqio.Vocabulary) -> str:
    """The record of the vocabulary in a checkpoint; a checkpoint with another record does not fit."""
    return f'{fingerprint(vocab)} of {vocab.vocab_size} ids'


def check_ids(name: str, vocab: seqio.Vocabulary, model_vocab_size: int) -> None:
    """Raises UserError if `vocab`, the vocabulary of `name`, has ids that the model's table does not have."""
    size = vocab.vocab_size
    if size > model_vocab_size:
        raise UserError(
            f'the vocabulary of {name} has {size} ids and the model has VOCAB_SIZE = '
            f'{model_vocab_size}; set VOCAB_SIZE to {-(-size // 128) * 128} or use a smaller vocabulary'
        )
