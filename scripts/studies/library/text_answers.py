"""Answers as text: an encoder-decoder's rows of a task, and which of its answers are right.

`exact_match` is that of greedy decoding: a greedy output is the target exactly where the likeliest token after each
right beginning is the next right one, so one pass over the targets tells, and nothing is generated.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from library.rows import Rows, Splits, encoder_decoder
from remixer_t5x import tf_data
from remixer_t5x.errors import UserError
from remixer_t5x.models.losses import token_logits
from remixer_t5x.models.seq2seq import Seq2Seq

FILES: tuple[str, ...] = ()
METRICS = ('exact_match', 'token_accuracy')


def splits_of(task: Any, inputs: int, targets: int, validation_examples: int | None) -> Splits:
    """The examples that fit; the longer ones are left out."""
    train = rows_of(task, 'train', inputs, targets)
    return Splits(train, rows_of(task, 'validation', inputs, targets, validation_examples))


def rows_of(task: Any, split: str, inputs: int, targets: int, limit: int | None = None) -> Rows:
    """The examples of a split that fit, as padded rows; the longer ones are left out.

    Raises UserError where the data is missing, or nothing fits.
    """
    dataset = task.get_dataset(None, split=split, shuffle=False)
    lengths = {'inputs': inputs, 'targets': targets}
    found: dict[str, list[np.ndarray]] = {'inputs': [], 'targets': []}
    for example in tf_data.arrays(dataset):
        if all(len(example[name]) <= length for name, length in lengths.items()):
            for name, length in lengths.items():
                found[name].append(np.pad(example[name], (0, length - len(example[name]))))
        if limit and len(found['inputs']) == limit:
            break
    if not found['inputs']:
        raise UserError(f'no example of {task.name}, {split}, fits into {lengths}: give longer ones')
    return encoder_decoder(*(np.stack(found[name]) for name in lengths))


def right_answers(model: Seq2Seq) -> Callable[[Any, Rows], jax.Array]:
    """(params, rows) -> bool [examples, targets], true where the likeliest token is the next one, and at padding."""

    def right(params, rows):
        targets = rows['decoder_target_tokens']
        inputs = rows['encoder_input_tokens'], rows['decoder_input_tokens']
        hidden = model.module.apply({'params': params}, inputs[0], enable_dropout=False, method='encode')
        hidden = model.module.apply({'params': params}, hidden, *inputs, enable_dropout=False, method='decode_hidden')
        likeliest = jnp.argmax(token_logits(hidden, model.module.output_kernel(params)), axis=-1)
        return jnp.where(targets > 0, likeliest == targets, True)

    return jax.jit(right)


def judge(right: np.ndarray, rows: Rows) -> dict[str, float]:
    """Percentages of the rows and of the target tokens that are right, from what `right_answers` says of all rows."""
    is_target = rows['decoder_target_tokens'] > 0
    return {
        'exact_match': 100 * float(np.mean(np.all(right, axis=1))),
        'token_accuracy': 100 * float(np.sum(right & is_target) / np.sum(is_target)),
    }
