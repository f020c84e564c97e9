"""Examples as arrays: a task's splits, a batch of an encoder-decoder, and sums over many rows."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Rows = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Splits:
    """A task's examples; `labels` are the texts that the indices of a classifier's rows mean."""

    train: Rows
    validation: Rows
    labels: tuple[str, ...] = ()


def encoder_decoder(inputs: np.ndarray, targets: np.ndarray) -> Rows:
    """Padded ids [examples, length] under seqio's names; every target that is not padding counts in a loss."""
    inputs, targets = inputs.astype(np.int32), targets.astype(np.int32)
    return {
        'encoder_input_tokens': inputs,
        'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        'decoder_target_tokens': targets,
    }


def totals(
    judge: Callable[[Any, Any], Mapping[str, Any]],
    params: Any,
    rows: Rows,
    batch: int,
    place: Callable[[Any], Any] = lambda rows: rows,
) -> dict[str, float]:
    """The sums 'loss', 'correct' and 'weights' of `judge(params, rows)` over all rows, `batch` of them at a time.

    `place` puts a batch on devices.
    """
    found = dict.fromkeys(('loss', 'correct', 'weights'), 0.0)
    for start in range(0, len(rows['encoder_input_tokens']), batch):
        sums = judge(params, place({name: array[start : start + batch] for name, array in rows.items()}))
        found = {name: total + float(sums[name]) for name, total in found.items()}
    return found
