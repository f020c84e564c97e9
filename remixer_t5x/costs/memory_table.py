"""The table of `remixer-t5x info --memory`: the memory that a training step takes on a device."""

from typing import Any

from rich import box
from rich.table import Table

_ROWS = (
    ('parameters', 'parameters'),
    ('optimizer_state', 'optimizer state'),
    ('batch', 'batch'),
    ('padding', 'layout padding of the above'),
    ('temporaries', 'temporaries: gradients, activations'),
    ('results', 'results other than the state'),
    ('program', 'program'),
)


def memory_table(memory: Any, available: int | None) -> Table:
    """One row for each part, and the total.

    Args:
        memory: a `costs.step_memory.StepMemory`.
        available: bytes of one device; None omits the shares.
    """
    table = Table(show_footer=True, box=box.SIMPLE_HEAD)
    table.add_column('on each device', footer='total', no_wrap=True)
    table.add_column('bytes', footer=f'{memory.total:,}', justify='right', no_wrap=True)
    table.add_column('MiB', footer=mebibytes(memory.total), justify='right', no_wrap=True)
    if available is not None:
        table.add_column(f'% of {gibibytes(available)}', footer=_percent(memory.total, available), justify='right')
    for name, label in _ROWS:
        size = getattr(memory, name)
        table.add_row(label, f'{size:,}', mebibytes(size), *([_percent(size, available)] if available else []))
    return table


def verdict(memory: Any, available: int | None) -> str:
    """A sentence that says whether the step fits."""
    if available is None:
        return 'the hardware file does not say how much memory a device has; type it in GiB, such as --device_memory=16'
    if memory.total > available:
        return f'does not fit: {gibibytes(memory.total)} needed, {gibibytes(available)} available'
    return f'fits: {gibibytes(available - memory.total)} of {gibibytes(available)} are left'


def outcome(result: Any) -> str:
    """One `costs.memory_advice.Outcome` as a line."""
    end = '' if result.kept else ', saves no memory, not kept'
    return f'  {result.change.typed:<44} {gibibytes(result.memory.total):>12}{end}'


def mebibytes(size: int) -> str:
    """`1,234.5`."""
    return f'{size / 2**20:,.1f}'


def gibibytes(size: int) -> str:
    """`1.23 GiB`."""
    return f'{size / 2**30:,.2f} GiB'


def _percent(part: int, whole: int) -> str:
    return f'{100 * part / whole:.1f}'
