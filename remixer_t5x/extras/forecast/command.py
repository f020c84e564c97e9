"""`remixer-t5x info --speed`: computes the minimum time of a training step on hardware that is not available."""

import argparse
import copy
import functools
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

from remixer_t5x import lazy
from remixer_t5x.cli import console
from remixer_t5x.cli.info import memory
from remixer_t5x.costs import step_memory
from remixer_t5x.costs.step_memory import StepSpec
from remixer_t5x.devices.described_hardware import Hardware
from remixer_t5x.devices.hardware_table import Topology
from remixer_t5x.extras.forecast import forecast, machines, speed_table
from remixer_t5x.extras.forecast.forecast import Forecast, RecommendedChange

# Number of measured steps, after two warm-up steps.
_MEASURED_STEPS = 10
_NOTE = 'The bound is a lower limit and not a prediction: compare ratios of bounds or of estimates, not milliseconds.'
_print = functools.partial(console.print_items, pipe_width=150)


def show(args: argparse.Namespace) -> None:
    """Prints the forecast of one configuration, then compiles the first N recommended changes (`--speed=N`)."""
    step, hardware = _build_step(args)
    _print(memory.describe_step(step, hardware, _compiler(hardware)))
    current = _forecast_step(step, hardware)
    tables = speed_table.build_work_table(current), speed_table.build_time_table(current, args.price)
    _print(*tables, *forecast.describe_uncounted(current))
    _print('most expensive operations:', speed_table.build_operations_table(current))
    if current.bound.exchanges:
        _print(speed_table.build_collectives_table(current))
    _print('what limits the step:', *(f'  {line}' for line in forecast.describe_limits(current)))
    changes = list(forecast.recommend_changes(current, hardware.memory_bytes))
    _print('what to change:' if changes else 'no known change of mesh, batch, remat or dtype would help')
    _print(*(f'  {change.flag:<32} {change.reason}' for change in changes))
    _compile_changes(args, current, changes[: args.speed])
    _print(memory.describe_memory_fit(current.memory, hardware.memory_bytes), _NOTE)


def compare(args: argparse.Namespace, models: Sequence[str], sizes: Sequence[str]) -> None:
    """Prints a table of forecasts for all `models` at all `sizes`; other settings come from the command line."""
    forecasts: list[tuple[str, str, Forecast]] = []
    for size in sizes:
        for model in models:
            changed = copy.copy(args)
            changed.gin_file = [f'models/{model}.gin', *args.gin_file, f'sizes/{size}.gin']
            changed.model = model
            step, hardware = _build_step(changed)
            if not forecasts:
                _print(memory.describe_step(step, hardware, _compiler(hardware)))
            forecasts.append((model, size, _forecast_step(step, hardware)))
            _print(f'  compiled {model} {size} ({len(forecasts)} of {len(models) * len(sizes)})')
    _print(speed_table.build_comparison_table(forecasts), _NOTE)


def print_measured_step(args: argparse.Namespace) -> None:
    """Measures the median time of a train step on the local devices, and prints it next to the forecast.

    Prints nothing if the peak rates of the device are unknown.
    """
    devices = jax.devices()
    chip = machines.chip_name(devices[0].device_kind)
    if chip:
        step, _ = memory.read_step(args)
        bound = forecast.forecast_step(step, chip, [getattr(device, 'slice_index', 0) or 0 for device in devices])
        _print(speed_table.build_time_table(bound, args.price, measure_step(step)))


def measure_step(step: StepSpec) -> float:
    """Measures the median seconds of a train step on the local devices, after two warm-up steps."""
    program = step_memory.compile_step(step, for_analysis=False)
    # A row of ones is a single example whose tokens all have a loss weight of 1.
    batch = {
        name: jax.device_put(np.ones(array.shape, array.dtype), array.sharding)
        for name, array in step.sharded_batch().items()
    }
    state, seconds = step.plan.create(jax.random.key(0)), []
    for _ in range(_MEASURED_STEPS + 2):
        start = time.perf_counter()
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _build_step(args: argparse.Namespace) -> tuple[StepSpec, Hardware]:
    """Builds the training step that the command line describes, for the devices in TOPOLOGY."""
    step, hardware = memory.read_step(args)
    hardware.require_chip_compiler()
    with lazy.discard_stderr():
        devices, _ = hardware.compile_devices()
    return memory.place_on_devices(step, hardware, devices), hardware


def _forecast_step(step: StepSpec, hardware: Hardware) -> Forecast:
    chip = Topology.parse(hardware.topology or '').chip
    slice_of = 'process_index' if hardware.platform == 'gpu' else 'slice_index'
    slices = [getattr(device, slice_of, None) or 0 for device in step.partitioner.mesh.devices.flat]
    # XLA prints warnings about slow compilations to stderr.
    with lazy.discard_stderr(), memory.trace_for_hardware(hardware, _compiler(hardware)):
        return forecast.forecast_step(step, chip, slices)


def _compile_changes(args: argparse.Namespace, current: Forecast, changes: Sequence[RecommendedChange]) -> None:
    """Compiles each recommended change separately, and prints its tokens per second relative to the current step."""
    if changes:
        _print('compiled separately:')
    for change in changes:
        changed = copy.copy(args)
        changed.gin_flags = [*args.gin_flags, (change.macro, change.value)]
        after = _forecast_step(*_build_step(changed))
        more_tokens = after.tokens / current.tokens
        gain = more_tokens * current.bound.serial_seconds / after.bound.serial_seconds
        line = f'{gain:.2f} times the tokens per second by the bound'
        if after.bound.estimated_seconds and current.bound.estimated_seconds:
            gain = more_tokens * current.bound.estimated_seconds / after.bound.estimated_seconds
            line += f", {gain:.2f} by the compiler's estimate"
        _print(f'  {change.flag:<32} {line}; {step_memory.format_gibibytes(after.memory.total)}')


def _compiler(hardware: Hardware) -> str:
    return f'XLA:{hardware.chip_compiler().upper()}'
