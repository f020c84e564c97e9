"""Answers as labels: a classifier's rows of a task whose targets are labels, and which of its answers are right."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from library.rows import Rows, Splits
from remixer_t5x import tf_data
from remixer_t5x.models.classifier import Classifier

FILES = ('model_types/classifier.gin',)
METRICS = ('accuracy',)


def splits_of(task: Any, inputs: int, targets: int = 0, validation_examples: int | None = None) -> Splits:
    """Texts cut to `inputs` tokens; the labels of the training split, sorted, are its labels."""
    assert not targets, 'a label has no tokens'
    lengths = {'inputs': inputs, 'targets': inputs}
    train, validation = (
        list(itertools.islice(tf_data.arrays(task.get_dataset(lengths, split=split, shuffle=False)), limit))
        for split, limit in (('train', None), ('validation', validation_examples))
    )
    labels = tuple(sorted({row['targets_pretokenized'].decode() for row in train}))

    def rows(found: list[Mapping[str, Any]]) -> Rows:
        padded = np.stack([np.pad(row['inputs'], (0, inputs - len(row['inputs']))) for row in found])
        return {
            'encoder_input_tokens': padded.astype(np.int32),
            'labels': np.asarray([labels.index(row['targets_pretokenized'].decode()) for row in found], np.float32),
            'label_weights': np.ones(len(found), np.float32),
        }

    return Splits(rows(train), rows(validation), labels)


def right_answers(model: Classifier) -> Callable[[Any, Rows], jax.Array]:
    """(params, rows) -> bool [examples]."""

    def right(params, rows):
        return jnp.argmax(model.classify(params, rows['encoder_input_tokens']), axis=-1) == rows['labels']

    return jax.jit(right)


def judge(right: np.ndarray, rows: Rows) -> dict[str, float]:
    """The percentage of rows that are right, from what `right_answers` says of all rows."""
    return {'accuracy': 100 * float(np.mean(right))}
