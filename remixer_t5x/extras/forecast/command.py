"""`remixer-t5x info --speed`: computes the minimum time of a training step on hardware that is not available."""

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np
from rich.table import Table

from remixer_t5x import lazy_imports
from remixer_t5x.cli import console
from remixer_t5x.cli.info import memory
from remixer_t5x.costs import step_memory
from remixer_t5x.costs.step_memory import StepSpec
from remixer_t5x.devices import chips
from remixer_t5x.devices.hardware_table import Hardware, Topology
from remixer_t5x.extras.forecast.forecast import (
    Forecast,
    describe_bottlenecks,
    describe_uncounted_kernels,
    forecast_step,
)
from remixer_t5x.extras.forecast.roofline import KernelCosts

# Number of measured steps, after two warmup steps.
_MEASURED_STEPS = 10
_NOTE = 'The bound is a lower limit and not a prediction: compare ratios of bounds or of estimates, not milliseconds.'
_print = functools.partial(console.print_with_rich, pipe_width=150)
_SHOWN_OPERATIONS = 10


def print_forecast(args: argparse.Namespace) -> None:
    """Prints the forecast of one configuration."""
    step, hardware = _build_step_spec(args)
    _print(memory.describe_train_step(step, hardware))
    current = _forecast_step(step, hardware)
    _print(build_work_table(current), build_time_table(current, args.price), *describe_uncounted_kernels(current))
    _print('most expensive operations:', build_operations_table(current))
    if current.bound.collectives:
        _print(build_collectives_table(current))
    _print('what limits the step:', *(f'  {line}' for line in describe_bottlenecks(current)))
    _print(memory.describe_memory_fit(current.memory, hardware.memory_bytes), _NOTE)


def print_comparison(args: argparse.Namespace, models: Sequence[str], sizes: Sequence[str]) -> None:
    """Prints a table of forecasts for all `models` at all `sizes`; other settings come from the command line."""
    forecasts: list[tuple[str, str, Forecast]] = []
    for size in sizes:
        for model in models:
            changed = copy.copy(args)
            changed.gin_file = [f'models/{model}.gin', *args.gin_file, f'sizes/{size}.gin']
            changed.model = model
            step, hardware = _build_step_spec(changed)
            if not forecasts:
                _print(memory.describe_train_step(step, hardware))
            forecasts.append((model, size, _forecast_step(step, hardware)))
            _print(f'  compiled {model} {size} ({len(forecasts)} of {len(models) * len(sizes)})')
    _print(build_comparison_table(forecasts), _NOTE)


def print_measured_step(args: argparse.Namespace) -> None:
    """Measures the median time of a train step on the local devices, and prints it next to the forecast.

    Prints nothing if the peak rates of the device are unknown.
    """
    devices = jax.devices()
    chip = chips.find_chip(devices[0].device_kind)
    if chip:
        step, _ = memory.read_step_spec(args)
        bound = forecast_step(step, chip, [getattr(device, 'slice_index', 0) or 0 for device in devices])
        _print(build_time_table(bound, args.price, measure_step(step)))


def measure_step(step: StepSpec) -> float:
    """Measures the median seconds of a train step on the local devices, after two warmup steps."""
    program = step_memory.compile_step(step, for_analysis=False)
    # A row of ones is a single example whose tokens all have a loss weight of 1.
    batch = {
        name: jax.device_put(np.ones(array.shape, array.dtype), array.sharding)
        for name, array in step.get_abstract_batch().items()
    }
    state, seconds = step.state_plan.create(jax.random.key(0)), []
    for _ in range(_MEASURED_STEPS + 2):
        start = time.perf_counter()
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _build_step_spec(args: argparse.Namespace) -> tuple[StepSpec, Hardware]:
    """Builds the training step that the command line describes, for the devices in TOPOLOGY."""
    step, hardware = memory.read_step_spec(args)
    hardware.require_chip_compiler()
    with lazy_imports.discard_stderr():
        devices = hardware.get_target_devices()
    return memory.place_step_on_devices(step, devices), hardware


def _forecast_step(step: StepSpec, hardware: Hardware) -> Forecast:
    chip = chips.CHIPS[Topology.from_string(hardware.topology or '').chip]
    slice_of = 'process_index' if hardware.platform == 'gpu' else 'slice_index'
    slices = [getattr(device, slice_of, None) or 0 for device in step.partitioner.mesh.devices.flat]
    # XLA prints warnings about slow compilations to stderr.
    with lazy_imports.discard_stderr(), memory.trace_for_hardware(hardware):
        return forecast_step(step, chip, slices)


def build_work_table(forecast: Forecast) -> Table:
    """Builds a table of the FLOPs and bytes of a step on one device, with the time that each takes at peak rates."""
    bound, chip = forecast.bound, forecast.bound.chip
    first = 'work of a step on a device'
    table = console.build_table(first, '', 'at', 'ms', words=(first,))

    def add_row(name: str, work: str, rate: str, seconds: float) -> None:
        table.add_row(name, work, rate, _format_milliseconds(seconds))

    for dtype, flops in bound.flops.most_common():
        peak = chip.peak_flops_per_second(dtype)
        add_row(f'products in {dtype}', f'{flops / 1e12:,.3f} TFLOP', f'{peak / 1e12:,.4g} TFLOP/s', flops / peak)
    size, bandwidth = bound.hbm_bytes, chip.bandwidth
    add_row('HBM traffic', f'{size / 1e9:,.2f} GB', f'{bandwidth / 1e9:,.0f} GB/s', size / bandwidth)
    add_row('collectives, bytes sent', f'{bound.bytes_sent / 1e9:,.3f} GB', '', bound.collective_seconds)
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
        ('at least' + (', collectives overlapped' if bound.collectives else ''), bound.overlapped_seconds),
        ('at least, collectives after kernels', bound.serial_seconds if bound.collectives else None),
        ("the TPU compiler's estimate", bound.estimated_seconds),
    ]
    for name, seconds in times:
        if seconds:
            cost = [f'{forecast.dollars_per_million_tokens(seconds, price):.3g}'] if price is not None else []
            rates = f'{forecast.step.batch_size / seconds:,.0f}', f'{forecast.tokens / seconds:,.0f}'
            table.add_row(name, _format_milliseconds(seconds), f'{forecast.mfu(seconds):.1%}', *rates, *cost)
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
            _format_milliseconds(work.kernel_seconds),
            f'{100 * work.kernel_seconds / bound.kernel_seconds:.1f}',
            *([_format_milliseconds(work.estimated_seconds)] if estimate else []),
            f'{work.flops.total() / 1e9:,.0f}',
            f'{work.hbm_bytes / 1e9:,.2f}',
            f'{work.num_kernel_runs:,}',
            limit,
        )

    for operation in bound.operations[:_SHOWN_OPERATIONS]:
        add_row(operation.location, operation, operation.bottleneck)
    if others := bound.operations[_SHOWN_OPERATIONS:]:
        work = KernelCosts(bound.chip, [kernel for operation in others for kernel in operation.kernels])
        add_row((f'{len(others)} others', '', ''), work, '')
    return table


def build_collectives_table(forecast: Forecast) -> Table:
    """Builds a table with a row for each kind of collective and type of link."""
    words = ('collective', 'link')
    table = console.build_table(*words, 'devices', 'times', 'MB sent by each device', 'ms', words=words)
    for collective in forecast.bound.collectives:
        time = '?' if collective.seconds is None else _format_milliseconds(collective.seconds)
        counts = str(collective.group_size), f'{collective.num_runs:,}', f'{collective.bytes_sent / 1e6:,.1f}'
        table.add_row(collective.kind, collective.link, *counts, time)
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
            _format_milliseconds(bound.estimated_seconds),
            _format_ratio(bound.estimated_seconds, first.bound.estimated_seconds),
        ]
        table.add_row(
            model,
            size,
            f'{bound.flops.total() / 1e12:,.3f}',
            f'{bound.hbm_bytes / 1e9:,.2f}',
            f'{bound.bytes_sent / 1e9:,.3f}',
            _format_milliseconds(bound.serial_seconds),
            _format_ratio(bound.serial_seconds, first.bound.serial_seconds),
            *(estimated if estimate else []),
            f'{forecast.mfu(bound.serial_seconds):.1%}',
            f'{forecast.memory.total / 2**30:,.2f}',
            _format_ratio(forecast.memory.total, first.memory.total),
        )
    return table


def _format_ratio(value: float, base: float) -> str:
    return f'{value / base:.2f}' if base else '-'


def _format_milliseconds(seconds: float) -> str:
    return f'{1e3 * seconds:,.2f}'
