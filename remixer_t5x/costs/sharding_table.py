"""The table of `remixer-t5x info --sharding`: how each parameter is sharded over a mesh, and which part a device
holds.
"""

import math
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

_FLOAT32_BYTES = 4


def sharding_table(rows: Sequence[Any]) -> Table:
    """One row for each parameter, with its note below, and the total.

    Args:
        rows: `devices.partition.ShardingRow`s.
    """
    total = sum(row.bytes_per_device for row in rows)
    table = Table(show_footer=True, box=box.SIMPLE_HEAD)
    table.add_column('parameter', footer='total', no_wrap=True)
    table.add_column('shape', no_wrap=True)
    table.add_column('logical axes', no_wrap=True)
    table.add_column('mesh axes', no_wrap=True)
    table.add_column('bytes per device', footer=f'{total:,}', justify='right', no_wrap=True)
    table.add_column('of', footer=_share(total, sum(map(_whole, rows))), justify='right', no_wrap=True)
    for row in rows:
        cells = (row.name, ' x '.join(map(str, row.shape)), _axes(row.logical_axes), _axes(row.mesh_axes))
        table.add_row(*cells, f'{row.bytes_per_device:,}', _share(row.bytes_per_device, _whole(row)))
        if row.note:
            table.add_row(f'  {row.note}')
    return table


def summary(rows: Sequence[Any]) -> list[str]:
    """Totals as sentences."""
    here, whole = sum(row.bytes_per_device for row in rows), sum(map(_whole, rows))
    split = sum(_whole(row) for row in rows if row.bytes_per_device < _whole(row))
    return [
        f'parameters in float32: {mebibytes(here)} on each device of {mebibytes(whole)} in all; '
        f'{100 * split / whole:.1f}% of them are split'
    ]


def mebibytes(size: int) -> str:
    """`1,234.5 MiB`."""
    return f'{size / 2**20:,.1f} MiB'


def _whole(row: Any) -> int:
    return math.prod(row.shape) * _FLOAT32_BYTES


def _axes(axes: Sequence[Any]) -> str:
    """`layers, embed, -`: a dash for an axis that has no name or is not split."""
    return ', '.join(_axis(axis) for axis in axes)


def _axis(axis: Any) -> str:
    if axis is None:
        return '-'
    return axis if isinstance(axis, str) else '+'.join(axis)


def _share(part: int, whole: int) -> str:
    """`1/8`, or a percentage if the share is not one over a whole number."""
    if whole % part == 0:
        return f'1/{whole // part}' if whole != part else 'all'
    return f'{100 * part / whole:.1f}%'
