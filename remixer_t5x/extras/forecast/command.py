"""`remixer-t5x info --speed`: how fast the training step of a configuration can be on a described machine."""

import argparse
import copy
import statistics
import time
from collections.abc import Sequence

import jax
import numpy as np

from remixer_t5x.api.building import build_model
from remixer_t5x.cli import console, quiet
from remixer_t5x.cli.info import memory
from remixer_t5x.costs import counts, memory_table, step_memory
from remixer_t5x.costs.step_memory import Step
from remixer_t5x.devices import compiler_options
from remixer_t5x.devices.hardware_table import Topology
from remixer_t5x.devices.hypothetical import Hardware
from remixer_t5x.extras.forecast import forecast, machines, published_speeds, speed_advice, speed_table
from remixer_t5x.extras.forecast.forecast import Forecast
from remixer_t5x.extras.forecast.speed_advice import Advice

# Measured steps, after two that are not counted.
_STEPS = 10
_NOTE = (
    'The bound says what the step cannot beat, not what it will take: compare ratios of it and of the estimate, '
    'not milliseconds.'
)


def show(args: argparse.Namespace) -> None:
    """Prints the forecast of one configuration, and compiles as many of its advised changes as `--speed` says.

    Raises:
        UserError: the compiler of the described chip is not installed, the mesh does not fit, or the step does not.
    """
    step, hardware = memory.read(args)
    step = _on_devices(step, hardware)
    _say(_described(step, hardware))
    found = _forecast(step, hardware)
    tables = [speed_table.work_table(found), speed_table.time_table(found, args.price), *speed_advice.uncounted(found)]
    _say(*tables, 'dearest operations:', speed_table.operations_table(found))
    if found.bound.exchanges:
        _say(speed_table.exchanges_table(found))
    _show_published(found, hardware)
    _say('what limits the step:', *(f'  {line}' for line in speed_advice.limits(found)))
    changes = speed_advice.advice(found, hardware.memory_bytes)
    _say('what to change:' if changes else 'no change of mesh, batch, remat or dtype that we know of would help')
    _say(*(f'  {change.typed:<32} {change.reason}' for change in changes))
    _try(args, found, changes[: args.speed])
    _say(memory_table.verdict(found.memory, hardware.memory_bytes), _NOTE)


def compare(args: argparse.Namespace, models: Sequence[str], sizes: Sequence[str]) -> None:
    """Prints a table of all `models` at all `sizes`, with the other settings of the command line.

    Raises:
        UserError: as `show`; or a model or a size does not exist.
    """
    forecasts: list[tuple[str, str, Forecast]] = []
    for size in sizes:
        for model in models:
            step, hardware = memory.read(_with_model(args, model, size))
            step = _on_devices(step, hardware)
            if not forecasts:
                _say(_described(step, hardware))
            forecasts.append((model, size, _forecast(step, hardware)))
            _say(f'  compiled {model} {size} ({len(forecasts)} of {len(models) * len(sizes)})')
    _say(speed_table.comparison_table(forecasts), _NOTE)


def show_measured(args: argparse.Namespace) -> None:
    """Prints the median time of a train step on this process's devices next to its forecast.

    Prints nothing on a device without published peaks.
    """
    devices = jax.devices()
    chip = machines.chip_of(devices[0].device_kind)
    if not chip:
        return
    step, _ = memory.read(args)
    found = forecast.forecast(step, chip, [getattr(device, 'slice_index', 0) or 0 for device in devices])
    _say(speed_table.time_table(found, args.price, seconds_of_step(step)))


def _with_model(args: argparse.Namespace, model: str, size: str) -> argparse.Namespace:
    changed = copy.copy(args)
    changed.gin_file = [f'models/{model}.gin', *args.gin_file, f'sizes/{size}.gin']
    changed.model = model
    return changed


def _on_devices(step: Step, hardware: Hardware) -> Step:
    """The step with a mesh of the described devices."""
    hardware.require_own_compiler()
    with quiet.imports(tensorflow=False):
        devices, _ = hardware.compile_devices()
    return memory.placed(step, hardware, devices)


def _forecast(step: Step, hardware: Hardware) -> Forecast:
    chip = Topology.parse(hardware.topology or '').chip
    # XLA complains there about compilations that take minutes.
    with quiet.imports(tensorflow=False), memory.tracing_for(hardware, _compiler(hardware)):
        return forecast.forecast(step, chip, _slices(step, hardware))


def _slices(step: Step, hardware: Hardware) -> list[int]:
    """The slice or node of each device, in the order of the mesh."""
    attribute = 'process_index' if hardware.platform == 'gpu' else 'slice_index'
    return [getattr(device, attribute, None) or 0 for device in step.partitioner.mesh.devices.flat]


def _show_published(found: Forecast, hardware: Hardware) -> None:
    chip = Topology.parse(hardware.topology or '').chip
    speeds = published_speeds.of_chip(chip)
    if not speeds:
        _say(f'we know of no published training speed of T5X on a {found.bound.machine.name}')
        return
    with_flops = []
    for speed in speeds:
        model = build_model('models/t5_1_1.gin', f'sizes/{speed.size}.gin')
        with_flops.append((speed, counts.count(model, published_speeds.LENGTHS).training_flops))
    source = (
        f'published for 512 input and 128 target tokens: {speeds[0].source}; MFU to the bfloat16 peak, by our FLOPs'
    )
    _say(speed_table.published_table(found, with_flops), source)


def _try(args: argparse.Namespace, found: Forecast, changes: Sequence[Advice]) -> None:
    """Compiles each change by itself."""
    if changes:
        _say('compiled, each by itself:')
    for change in changes:
        changed = copy.copy(args)
        changed.gin_flags = [*args.gin_flags, (change.macro, change.value)]
        step, hardware = memory.read(changed)
        tried = _forecast(_on_devices(step, hardware), hardware)
        _say(f'  {change.typed:<32} {_gain(tried, found)}')


def _gain(tried: Forecast, found: Forecast) -> str:
    """Tokens per second of a change, to the step's as it was given."""
    bound = (tried.tokens / tried.bound.serial_seconds) / (found.tokens / found.bound.serial_seconds)
    line = f'{bound:.2f} times the tokens per second by the bound'
    if tried.bound.estimated_seconds and found.bound.estimated_seconds:
        rates = [each.tokens / each.bound.estimated_seconds for each in (tried, found)]
        line += f", {rates[0] / rates[1]:.2f} by the compiler's estimate"
    return f'{line}; {memory_table.gibibytes(tried.memory.total)}'


def _described(step: Step, hardware: Hardware) -> str:
    return memory.describe(step, hardware, _compiler(hardware))


def _compiler(hardware: Hardware) -> str:
    return f'XLA:{hardware.own_compiler().upper()}'


def seconds_of_step(step: Step) -> float:
    """The median time of a train step on this process's devices, after two steps that are not counted."""
    device = step.partitioner.mesh.devices.flat[0]
    options = compiler_options.for_training(step.xla_options, device)
    program = compiler_options.compiled(step_memory.lowered(step), options)
    # An array of ones is one example of a row, each token with a weight.
    batch = {
        name: jax.device_put(np.ones(array.shape, array.dtype), array.sharding)
        for name, array in step_memory.abstract_batch(step).items()
    }
    state, seconds = step.plan().create(jax.random.key(0)), []
    for _ in range(_STEPS + 2):
        begun = time.perf_counter()
        state, metrics = program(state, batch)
        jax.block_until_ready(metrics)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


def _say(*parts: object) -> None:
    console.show(*parts, pipe_width=150)
