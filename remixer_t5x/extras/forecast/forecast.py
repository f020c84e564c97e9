"""Forecasts a training step on given hardware: minimum time, memory and bottlenecks."""

import dataclasses
from collections.abc import Sequence

from remixer_t5x.costs import model_counts, step_memory
from remixer_t5x.costs.step_memory import StepMemory, StepSpec
from remixer_t5x.devices.chips import Chip
from remixer_t5x.errors import UserError
from remixer_t5x.extras.forecast import compiled_program, roofline
from remixer_t5x.extras.forecast.roofline import StepTimeBound
from remixer_t5x.kernels.compile_target import compile_for_platform


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A compiled training step with its cost estimates.

    Attributes:
        bound: minimum time of the step on one device.
        memory: memory of the step on one device.
        model_flops: model FLOPs of a step, summed over all devices: three times the FLOPs of the forward pass.
        tokens: input and target tokens of a global batch, including padding.
    """

    step: StepSpec
    bound: StepTimeBound
    memory: StepMemory
    model_flops: float
    tokens: int
    devices: int

    def mfu(self, seconds: float) -> float:
        """Returns the model FLOPs utilization (Chowdhery et al. 2022, "PaLM") if a step takes `seconds`."""
        return self.model_flops / (seconds * self.devices * self.bound.chip.peak_flops_per_second('bf16'))

    def dollars_per_million_tokens(self, seconds: float, price: float) -> float:
        """Returns the cost of a million tokens in dollars, for a step time in seconds and a price per chip-hour."""
        chips = self.devices / self.bound.chip.devices_per_chip
        return price * chips * seconds / 3600 / self.tokens * 1e6


def forecast_step(step: StepSpec, chip: Chip, slices: Sequence[int]) -> Forecast:
    """Compiles a training step for the devices of its partitioner, and computes a lower bound on the step time.

    Args:
        chip: the chip of the devices.
        slices: index of the slice or node of each device, in mesh order.

    Raises:
        UserError: the memory of a device is too small for the step.
    """
    try:
        compiled = step_memory.compile_step(step)
    except Exception as error:
        if not step_memory.is_out_of_memory_error(error):
            raise
        raise UserError(
            f'the step does not fit into the memory of a {chip.name}; use --memory instead of --speed '
            'to find changes that make it fit'
        ) from None
    program = compiled_program.parse_program(compiled.as_text(), len(slices))
    # The model is traced without custom kernels, because matrix products inside custom kernels are not counted.
    with compile_for_platform('accelerator'):
        row_counts = model_counts.count_row_costs(step.model, step.batch)
    return Forecast(
        step=step,
        bound=roofline.compute_step_time_bound(program, chip, slices),
        memory=step_memory.read_memory_usage(step, compiled),
        model_flops=step.batch_size * row_counts.training_flops,
        tokens=step.batch_size * row_counts.tokens,
        devices=len(slices),
    )


def describe_bottlenecks(forecast: Forecast) -> list[str]:
    """Describes the bottlenecks of the step, in decreasing order of time."""
    bound = forecast.bound
    parts = [
        ('compute', 'in kernels that fill the matrix units', bound.compute_seconds),
        ('HBM', 'in kernels that wait for memory', bound.kernel_seconds - bound.compute_seconds),
        ('interconnect', 'of collectives, which may overlap with the kernels', bound.collective_seconds),
        (f'gaps between {bound.num_kernel_runs:,} kernels', '(a guess, not in the bound)', bound.gap_seconds),
    ]
    return [
        f'{name}: {format_milliseconds(seconds)} {description} ({seconds / bound.serial_seconds:.0%})'
        for name, description, seconds in sorted(parts, key=lambda part: -part[2])
        if seconds > 0
    ]


def describe_uncounted_kernels(forecast: Forecast) -> list[str]:
    """Describes the kernels without a FLOP count, and those without a time estimate from the TPU compiler."""
    lines, bound = [], forecast.bound
    names = sorted({kernel.op for kernel in bound.kernels if kernel.is_opaque})
    if names:
        lines.append(f'{", ".join(names)} report no FLOPs: the bound counts only the bytes that they read and write')
    missing = bound.unestimated_seconds()
    if bound.estimated_seconds and missing.total() > 0:
        listed = ', '.join(f'{op} {format_milliseconds(seconds)}' for op, seconds in missing.most_common(4))
        lines.append(
            f'lower bound of kernels without a compiler estimate: {format_milliseconds(missing.total())} ({listed})'
        )
    return lines


def format_milliseconds(seconds: float) -> str:
    """Formats seconds as milliseconds with three significant digits, such as `12.3 ms`."""
    return f'{1e3 * seconds:,.3g} ms' if seconds < 1 else f'{1e3 * seconds:,.0f} ms'
