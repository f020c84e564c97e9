"""`remixer-t5x info`: parameters and FLOPs of a model, module by module, without a device."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from remixer_t5x.costs import counts, table
from remixer_t5x.errors import UserError

_PIPE_WIDTH = 110


def run(model: Any, feature_lengths: Mapping[str, int], depth: int = 3) -> None:
    """Prints the table; gin binds the arguments in `runs/info.gin`.

    Args:
        model: a `Seq2Seq`, from the macro MODEL.
        feature_lengths: `inputs` and `targets` in tokens, from TASK_FEATURE_LENGTHS.
        depth: how many levels of modules to show.

    Raises:
        UserError: depth is no positive number, or a length is missing.
    """
    if not isinstance(depth, int) or depth < 1:
        raise UserError(f'depth is {depth!r}; type a whole number from 1, such as --depth 3')
    check_lengths(feature_lengths)
    counted = counts.count(model, feature_lengths)
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    # Written by us, because rich would end the process itself when the reader of a pipe has left.
    with console.capture() as captured:
        console.print(table.cost_table(counted, depth))
        for line in table.summary(counted, feature_lengths):
            console.print(line, soft_wrap=True)
    sys.stdout.write(captured.get())


def check_lengths(feature_lengths: Mapping[str, int]) -> None:
    """Refuses feature lengths that are not positive numbers for exactly `inputs` and `targets`."""
    right = isinstance(feature_lengths, Mapping) and set(feature_lengths) == {'inputs', 'targets'}
    if not right or not all(isinstance(length, int) and length > 0 for length in feature_lengths.values()):
        raise UserError(
            f'TASK_FEATURE_LENGTHS is {feature_lengths!r}; '
            "type a length for both features, such as {'inputs': 512, 'targets': 114}"
        )
