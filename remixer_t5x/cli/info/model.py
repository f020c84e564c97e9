"""`remixer-t5x info`: parameters and FLOPs of a model, module by module."""

from collections.abc import Mapping
from typing import Any

from remixer_t5x.cli import console
from remixer_t5x.costs import counts, table
from remixer_t5x.errors import UserError


def show(model: Any, feature_lengths: Mapping[str, int], depth: int) -> None:
    """Prints the table of a `Seq2Seq`, `depth` levels of modules deep.

    Raises:
        UserError: a feature length is missing.
    """
    check_lengths(feature_lengths)
    counted = counts.count(model, feature_lengths)
    console.show(table.cost_table(counted, depth), *table.summary(counted, feature_lengths), pipe_width=110)


def check_lengths(feature_lengths: Mapping[str, int]) -> None:
    """Refuses feature lengths that are not positive numbers for exactly `inputs` and `targets`."""
    right = isinstance(feature_lengths, Mapping) and set(feature_lengths) == {'inputs', 'targets'}
    if not right or not all(isinstance(length, int) and length > 0 for length in feature_lengths.values()):
        raise UserError(
            f'TASK_FEATURE_LENGTHS is {feature_lengths!r}; '
            "type a length for both features, such as {'inputs': 512, 'targets': 114}"
        )
