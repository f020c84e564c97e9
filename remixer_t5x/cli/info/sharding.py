"""`remixer-t5x info --sharding`: which device of a described mesh holds which part of which parameter."""

import dataclasses
import fnmatch
from collections.abc import Mapping

from remixer_t5x.cli import console
from remixer_t5x.cli.info.model import checked_lengths
from remixer_t5x.costs import sharding_table
from remixer_t5x.data import frames
from remixer_t5x.devices import mesh
from remixer_t5x.devices.hypothetical import Hardware
from remixer_t5x.devices.partition import Partitioner
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface
from remixer_t5x.models.interface import Model


def show(
    model: Model,
    partitioner: Partitioner,
    hardware: Hardware,
    feature_lengths: Mapping[str, int] | None,
    pattern: str,
) -> None:
    """Prints the table. Needs no device of the described kind.

    Args:
        model: the model.
        partitioner: mesh sizes and rules, from a hardware file.
        hardware: how many devices there are.
        feature_lengths: `inputs` and `targets` in tokens.
        pattern: shows the parameters whose names fit, such as 'encoder/*'.

    Raises:
        UserError: the mesh does not fit the number of devices, or no parameter fits the pattern.
    """
    described = dataclasses.replace(partitioner, devices=hardware.count())
    shapes = frames.batch_shapes(model.frame, checked_lengths(model.frame, feature_lengths))
    boxed = interface.param_shapes(model, shapes)
    rows = described.sharding_table(boxed)
    shown = [row for row in rows if fnmatch.fnmatch(row.name, pattern)]
    if not shown:
        raise UserError(f"no parameter fits {pattern!r}; type a part of a name and stars, such as '{rows[0].name}'")
    head = f'{described.mesh.size} devices, {mesh.spelt(described.mesh.shape)}'
    console.show(head, sharding_table.sharding_table(shown), *sharding_table.summary(rows), pipe_width=160)
