"""`remixer-t5x info --sharding`: shows how each parameter is sharded over the device mesh."""

import argparse
import dataclasses
import fnmatch
import math
from collections.abc import Sequence

from rich.table import Table

from remixer_t5x.cli import arguments, console
from remixer_t5x.cli.info.model import LENGTHS_MACRO, check_lengths
from remixer_t5x.data import batch_formats
from remixer_t5x.devices import mesh
from remixer_t5x.devices.described_hardware import Hardware
from remixer_t5x.devices.partition import ShardingRow
from remixer_t5x.errors import UserError
from remixer_t5x.models import interface

_FLOAT32_BYTES = 4


def show(args: argparse.Namespace) -> None:
    """Prints the sharding of the parameters whose names match `--sharding`. The devices need not be present."""
    macros = ('MODEL', 'PARTITIONER', 'DEVICES', *LENGTHS_MACRO)
    model, partitioner, devices, lengths = arguments.load_values(args, *macros, defaults=LENGTHS_MACRO)
    described = dataclasses.replace(partitioner, devices=Hardware(devices=args.devices or devices).count())
    shapes = batch_formats.batch_shapes(model.model_type, check_lengths(model.model_type, lengths))
    rows = described.sharding_table(interface.param_shapes(model, shapes))
    shown = [row for row in rows if fnmatch.fnmatch(row.name, args.sharding)]
    if not shown:
        raise UserError(
            f'--sharding must match the name of a parameter, got {args.sharding!r}; pass a pattern such as '
            f"'*', or a name such as '{rows[0].name}'"
        )
    local, total = sum(row.bytes_per_device for row in rows), sum(map(_total_bytes, rows))
    split = sum(_total_bytes(row) for row in rows if row.bytes_per_device < _total_bytes(row))
    console.print_items(
        f'{described.mesh.size} devices, {mesh.format_shape(described.mesh.shape)}',
        sharding_table(shown),
        f'parameters in float32: {local / 2**20:,.1f} MiB on each device of {total / 2**20:,.1f} MiB in all; '
        f'{100 * split / total:.1f}% of them are split',
        pipe_width=160,
    )


def sharding_table(rows: Sequence[ShardingRow]) -> Table:
    """Returns a table with a row for each parameter, followed by the parameter's note, and a row for the total."""
    words = ('parameter', 'shape', 'logical axes', 'mesh axes')
    table = console.build_table(*words, 'bytes per device', 'share', words=words)
    for row in rows:
        # Shows an axis that is split over two mesh axes as `data+fsdp`, and an unnamed or unsplit axis as a dash.
        axes = [
            ', '.join('+'.join(axis) if isinstance(axis, tuple) else axis or '-' for axis in names)
            for names in (row.logical_axes, row.mesh_axes)
        ]
        size = f'{row.bytes_per_device:,}', _share(row.bytes_per_device, _total_bytes(row))
        table.add_row(row.name, ' x '.join(map(str, row.shape)), *axes, *size)
        if row.note:
            table.add_row(f'  {row.note}')
    table.add_section()
    local = sum(row.bytes_per_device for row in rows)
    table.add_row('total', '', '', '', f'{local:,}', _share(local, sum(map(_total_bytes, rows))))
    return table


def _total_bytes(row: ShardingRow) -> int:
    return math.prod(row.shape) * _FLOAT32_BYTES


def _share(part: int, whole: int) -> str:
    """Formats a fraction as `1/8`, or as a percentage if it is not the reciprocal of an integer."""
    if whole % part == 0:
        return f'1/{whole // part}' if whole != part else 'all'
    return f'{100 * part / whole:.1f}%'
