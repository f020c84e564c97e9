"""Builds the tables of `remixer-t5x info --speed`."""

from collections.abc import Sequence

from rich.table import Table

from remixer_t5x.cli import console
from remixer_t5x.extras.forecast.forecast import Forecast
from remixer_t5x.extras.forecast.roofline import KernelCosts

_SHOWN_OPERATIONS = 10


def build_work_table(forecast: Forecast) -> Table:
    """Builds a table of the FLOPs and bytes of a step on one device, with the time that each takes at peak rates."""
    bound, machine = forecast.bound, forecast.bound.machine
    first = 'work of a step on a device'
    table = console.build_table(first, '', 'at', 'ms', words=(first,))
    for dtype, flops in bound.flops.most_common():
        peak = machine.peak(dtype)
        cells = f'{flops / 1e12:,.3f} TFLOP', f'{peak / 1e12:,.4g} TFLOP/s', _format_ms(flops / peak)
        table.add_row(f'products in {dtype}', *cells)
    rate = f'{machine.bandwidth / 1e9:,.0f} GB/s'
    table.add_row('HBM traffic', f'{bound.bytes / 1e9:,.2f} GB', rate, _format_ms(bound.bytes / machine.bandwidth))
    table.add_row(
        'collectives, bytes sent', f'{bound.bytes_sent / 1e9:,.3f} GB', '', _format_ms(bound.exchange_seconds)
    )
    return table


def build_time_table(forecast: Forecast, price: float | None, measured: float | None = None) -> Table:
    """Builds a table of step times, with utilization, throughput and cost.

    Args:
        price: dollars per chip-hour, or None to omit the cost.
        measured: measured seconds per step, or None to omit the row.
    """
    bound = forecast.bound
    dollars = ['$ per M tokens'] if price is not None else []
    table = console.build_table('step time', 'ms', 'MFU', 'sequences/s', 'tokens/s', *dollars, words=('step time',))
    times = [
        ('measured', measured),
        ('at least' + (', collectives overlapped' if bound.exchanges else ''), bound.overlapped_seconds),
        ('at least, collectives after kernels', bound.serial_seconds if bound.exchanges else None),
        ("the TPU compiler's estimate", bound.estimated_seconds),
    ]
    for name, seconds in times:
        if seconds:
            cost = [f'{forecast.dollars_per_million_tokens(seconds, price):.3g}'] if price is not None else []
            rates = f'{forecast.step.rows / seconds:,.0f}', f'{forecast.tokens / seconds:,.0f}'
            table.add_row(name, _format_ms(seconds), f'{forecast.mfu(seconds):.1%}', *rates, *cost)
    return table


def build_operations_table(forecast: Forecast) -> Table:
    """Builds a table of the most expensive operations and their Flax modules."""
    bound = forecast.bound
    words = ('module', 'phase', 'operation')
    estimate = ['est. ms'] if bound.estimated_seconds else []
    table = console.build_table(*words, 'ms', '%', *estimate, 'GFLOP', 'GB', 'kernels', 'limit', words=words)

    def add_row(names: Sequence[str], work: KernelCosts, limit: str) -> None:
        table.add_row(
            *names,
            _format_ms(work.seconds),
            f'{100 * work.seconds / bound.seconds:.1f}',
            *([_format_ms(work.estimated_seconds)] if estimate else []),
            f'{work.flops.total() / 1e9:,.0f}',
            f'{work.bytes / 1e9:,.2f}',
            f'{work.count:,}',
            limit,
        )

    for operation in bound.operations[:_SHOWN_OPERATIONS]:
        add_row(operation.location, operation, operation.limit)
    if others := bound.operations[_SHOWN_OPERATIONS:]:
        work = KernelCosts(bound.machine, [kernel for operation in others for kernel in operation.kernels])
        add_row((f'{len(others)} others', '', ''), work, '')
    return table


def build_collectives_table(forecast: Forecast) -> Table:
    """Builds a table with a row for each kind of collective and type of link."""
    words = ('collective', 'link')
    table = console.build_table(*words, 'devices', 'times', 'MB sent by each device', 'ms', words=words)
    for exchange in forecast.bound.exchanges:
        time = '?' if exchange.seconds is None else _format_ms(exchange.seconds)
        counts = str(exchange.group_size), f'{exchange.times:,}', f'{exchange.bytes_sent / 1e6:,.1f}'
        table.add_row(exchange.kind, exchange.link, *counts, time)
    return table


def build_comparison_table(forecasts: Sequence[tuple[str, str, Forecast]]) -> Table:
    """Builds a table that compares models; ratios are relative to the first model of each size.

    Args:
        forecasts: tuples (model name, size name, forecast).
    """
    estimate = ['est. ms', 'ratio'] if any(forecast.bound.estimated_seconds for _, _, forecast in forecasts) else []
    headings = ('TFLOP', 'GB', 'GB sent', 'at least, ms', 'ratio', *estimate, 'MFU', 'memory GiB', 'ratio')
    table = console.build_table('model', 'size', *headings, words=('model', 'size'))
    first_of_size: dict[str, Forecast] = {}
    for model, size, forecast in forecasts:
        first, bound = first_of_size.setdefault(size, forecast), forecast.bound
        estimated = [
            _format_ms(bound.estimated_seconds),
            _format_ratio(bound.estimated_seconds, first.bound.estimated_seconds),
        ]
        table.add_row(
            model,
            size,
            f'{bound.flops.total() / 1e12:,.3f}',
            f'{bound.bytes / 1e9:,.2f}',
            f'{bound.bytes_sent / 1e9:,.3f}',
            _format_ms(bound.serial_seconds),
            _format_ratio(bound.serial_seconds, first.bound.serial_seconds),
            *(estimated if estimate else []),
            f'{forecast.mfu(bound.serial_seconds):.1%}',
            f'{forecast.memory.total / 2**30:,.2f}',
            _format_ratio(forecast.memory.total, first.memory.total),
        )
    return table


def _format_ratio(value: float, base: float) -> str:
    return f'{value / base:.2f}' if base else '-'


def _format_ms(seconds: float) -> str:
    return f'{1e3 * seconds:,.2f}'
