"""The tables of `remixer-t5x info --speed`."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from remixer_t5x.extras.forecast.forecast import Forecast
from remixer_t5x.extras.forecast.published_speeds import PublishedSpeed

_SHOWN = 10


def work_table(found: Forecast) -> Table:
    """What a device does in a step, and the time of each kind of work at the machine's rate."""
    bound, machine = found.bound, found.bound.machine
    table = _table('work of a step on a device', '', 'at', 'ms', words=1)
    for number, flops in sorted(_flops(found).items(), key=lambda part: -part[1]):
        peak = machine.peak(number)
        table.add_row(
            f'products in {number}', f'{flops / 1e12:,.3f} TFLOP', f'{peak / 1e12:,.4g} TFLOP/s', _ms(flops / peak)
        )
    rate = f'{machine.bandwidth / 1e9:,.0f} GB/s'
    table.add_row('HBM traffic', f'{bound.bytes / 1e9:,.2f} GB', rate, _ms(bound.bytes / machine.bandwidth))
    sent = sum(exchange.sent for exchange in bound.exchanges)
    table.add_row('collectives, bytes sent', f'{sent / 1e9:,.3f} GB', '', _ms(bound.exchange_seconds))
    return table


def time_table(found: Forecast, price: float | None, measured: float | None = None) -> Table:
    """The time of a step by several measures, and what follows for training.

    Args:
        price: dollars for a chip and hour; None leaves out the cost.
        measured: seconds of a step that ran.
    """
    dollars = ['$ per M tokens'] if price is not None else []
    table = _table('step time', 'ms', 'MFU', 'sequences/s', 'tokens/s', *dollars, words=1)
    for name, seconds in [*([('measured', measured)] if measured else []), *_times(found)]:
        cost = [f'{found.dollars_per_million_tokens(seconds, price):.3g}'] if price is not None else []
        table.add_row(
            name,
            _ms(seconds),
            f'{found.mfu(seconds):.1%}',
            f'{found.step.rows / seconds:,.0f}',
            f'{found.tokens / seconds:,.0f}',
            *cost,
        )
    return table


def _times(found: Forecast) -> list[tuple[str, float]]:
    bound = found.bound
    exposed = [('at least, collectives after kernels', bound.serial_seconds)] if bound.exchanges else []
    hidden = ', collectives behind kernels' if bound.exchanges else ''
    estimated = [("the TPU compiler's estimate", bound.estimated_seconds)] if bound.estimated_seconds else []
    return [(f'at least{hidden}', bound.best_seconds), *exposed, *estimated]


def operations_table(found: Forecast) -> Table:
    """The dearest operations, by our modules."""
    bound = found.bound
    estimate = ['est. ms'] if bound.estimated_seconds else []
    headings = ('phase', 'operation', 'ms', '%', *estimate, 'GFLOP', 'GB', 'kernels', 'limit')
    table = _table('module', *headings, words=3)
    for operation in bound.operations[:_SHOWN]:
        cells = [
            _ms(operation.seconds),
            f'{100 * operation.seconds / bound.kernel_seconds:.1f}',
            *([_ms(operation.estimated)] if estimate else []),
            f'{sum(operation.flops.values()) / 1e9:,.0f}',
            f'{operation.bytes / 1e9:,.2f}',
            f'{operation.times:,}',
            operation.limit,
        ]
        table.add_row(operation.place.module, operation.place.phase, operation.place.primitive, *cells)
    rest = bound.operations[_SHOWN:]
    if rest:
        seconds, size = sum(each.seconds for each in rest), sum(each.bytes for each in rest)
        estimated = [_ms(sum(each.estimated for each in rest))] if estimate else []
        flops = sum(sum(each.flops.values()) for each in rest)
        share = f'{100 * seconds / bound.kernel_seconds:.1f}'
        kernels = f'{sum(each.times for each in rest):,}'
        cells = [_ms(seconds), share, *estimated, f'{flops / 1e9:,.0f}', f'{size / 1e9:,.2f}', kernels, '']
        table.add_row(f'{len(rest)} others', '', '', *cells)
    return table


def exchanges_table(found: Forecast) -> Table:
    """Collectives by kind and link."""
    table = _table('collective', 'link', 'devices', 'times', 'MB sent by each device', 'ms', words=2)
    for each in found.bound.exchanges:
        time = '?' if each.seconds is None else _ms(each.seconds)
        table.add_row(each.kind, each.link, str(each.members), f'{each.times:,}', f'{each.sent / 1e6:,.1f}', time)
    return table


def published_table(found: Forecast, speeds: Sequence[tuple[PublishedSpeed, float]]) -> Table:
    """What T5X reached on this chip, next to the least time of this step.

    Args:
        speeds: each with the training FLOPs of one of its sequences.
    """
    table = _table(
        'T5X as published, and this step', 'numbers', 'chips', 'rows a chip', 'sequences/s a chip', 'MFU', words=2
    )
    peak = found.bound.machine.peak('bf16')
    for speed, flops in speeds:
        mfu = f'{speed.sequences * flops / peak:.1%}'
        table.add_row(
            f'T5.1.1 {speed.size}', speed.numbers, str(speed.devices), str(speed.rows), f'{speed.sequences:,.1f}', mfu
        )
    seconds = found.bound.serial_seconds
    each = found.step.rows / found.devices
    number = max(_flops(found).items(), key=lambda part: part[1])[0]
    cells = [str(found.devices), f'{each:,.0f}', f'{each / seconds:,.1f}', f'{found.mfu(seconds):.1%}']
    table.add_row('this step, at most', number, *cells)
    return table


def comparison_table(forecasts: Sequence[tuple[str, str, Forecast]]) -> Table:
    """Models side by side; ratios are to the first of each size.

    Args:
        forecasts: names of the model and of its size, and the forecast.
    """
    estimate = ['est. ms', 'ratio'] if any(found.bound.estimated_seconds for _, _, found in forecasts) else []
    headings = ('size', 'TFLOP', 'GB', 'GB sent', 'at least, ms', 'ratio', *estimate, 'MFU', 'memory GiB', 'ratio')
    table = _table('model', *headings, words=2)
    first: dict[str, Forecast] = {}
    for model, size, found in forecasts:
        base, bound = first.setdefault(size, found), found.bound
        estimated = [_ms(bound.estimated_seconds), _ratio(bound.estimated_seconds, base.bound.estimated_seconds)]
        cells = [
            f'{bound.flops / 1e12:,.3f}',
            f'{bound.bytes / 1e9:,.2f}',
            f'{sum(exchange.sent for exchange in bound.exchanges) / 1e9:,.3f}',
            _ms(bound.serial_seconds),
            _ratio(bound.serial_seconds, base.bound.serial_seconds),
            *(estimated if estimate else []),
            f'{found.mfu(bound.serial_seconds):.1%}',
            f'{found.memory.total / 2**30:,.2f}',
            _ratio(found.memory.total, base.memory.total),
        ]
        table.add_row(model, size, *cells)
    return table


def _flops(found: Forecast) -> dict[str, float]:
    """FLOPs of a device by the type of number."""
    total: dict[str, float] = {}
    for operation in found.bound.operations:
        for number, flops in operation.flops.items():
            total[number] = total.get(number, 0.0) + flops
    return total


def _ratio(ours: float, base: float) -> str:
    return f'{ours / base:.2f}' if base else '-'


def _ms(seconds: float) -> str:
    return f'{1e3 * seconds:,.2f}'


def _table(*headings: str, words: int) -> Table:
    """A table whose first `words` columns are left-aligned."""
    table = Table(box=box.SIMPLE_HEAD)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify='left' if place < words else 'right', no_wrap=True)
    return table
