"""Creates batches from lists of token ids, and checks such lists and row lengths."""

from collections.abc import Mapping, Sequence

import numpy as np

from remixer_t5x import ranges
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import predictions


def make_batch(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], lengths: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Converts lists of token ids to a batch for `model.loss` or a train step.

    Args:
        inputs: the token ids of each input.
        targets: the token ids of each target. The decoder's inputs are the targets shifted by one token.
        lengths: row lengths of the arrays for `inputs` and `targets`; the defaults are the lengths of the longest input
            and target.

    Returns:
        A dictionary that maps seqio's feature names to [rows, length] int32 arrays, padded with 0.
    """
    check_lengths(lengths)
    check_same_length(inputs, targets)
    lengths = check_longest(inputs, targets, lengths or {})
    encoder = {'encoder_input_tokens': predictions.pad_ids(inputs, lengths['inputs'])}
    return {**encoder, **predictions.make_decoder_arrays(targets, lengths['targets'])}


def check_lengths(lengths: Mapping[str, int] | None) -> None:
    """Raises UserError if `lengths` is not None or a dictionary from `inputs` and `targets` to whole numbers."""
    ranges.check_setting('lengths', lengths, Mapping[str, int] | None)
    if unknown := sorted(set(lengths or {}) - {'inputs', 'targets'}):
        raise UserError(f'keys of lengths must be inputs or targets, got {", ".join(unknown)}')
    for side, length in (lengths or {}).items():
        ranges.check_setting(f'lengths[{side!r}]', length, ranges.Count)


def check_longest(
    inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], lengths: Mapping[str, int]
) -> dict[str, int]:
    """Returns `lengths`, by default the lengths of the longest rows. Raises UserError if a row is longer."""
    for side, rows in (('inputs', inputs), ('targets', targets)):
        if any(isinstance(row, str) or not hasattr(row, '__len__') for row in rows):
            raise UserError(f'{side} must be lists of token ids, got {rows!r:.60}; pass [[1, 2], [3]]')
    longest = {'inputs': max(map(len, inputs), default=0), 'targets': max(map(len, targets), default=0)}
    lengths = {**longest, **lengths}
    for side, length in lengths.items():
        if longest[side] > length:
            raise UserError(f'{side} must have at most {length} tokens, got {longest[side]}; truncate them first')
    return lengths


def check_same_length(inputs: Sequence[object], targets: Sequence[object]) -> None:
    """Raises UserError if the number of inputs differs from the number of targets."""
    if len(inputs) != len(targets):
        raise UserError(f'there must be a target for each input, got {len(inputs)} inputs and {len(targets)} targets')
