"""Forecasts a training step on given hardware: minimum time, memory, bottlenecks and recommended changes."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from remixer_t5x.costs import model_counts, step_memory
from remixer_t5x.costs.step_memory import StepMemory, StepSpec, format_gibibytes
from remixer_t5x.errors import UserError
from remixer_t5x.extras.forecast import compiled_program, roofline
from remixer_t5x.extras.forecast.roofline import RECOMPUTED, UPDATE, StepTimeBound
from remixer_t5x.kernels.compile_target import compile_for_platform

# Changes that save less than this fraction of the step time are not recommended.
_MIN_SAVING = 0.03
# More collective-permutes than this indicate windowed einsums, which are matrix products that XLA has split.
_MAX_PERMUTES = 100


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
        return self.model_flops / (seconds * self.devices * self.bound.machine.peak_flops_per_second('bf16'))

    def dollars_per_million_tokens(self, seconds: float, price: float) -> float:
        """Returns the cost of a million tokens in dollars, for a step time in seconds and a price per chip-hour."""
        chips = self.devices / self.bound.machine.devices_per_chip
        return price * chips * seconds / 3600 / self.tokens * 1e6


def forecast_step(step: StepSpec, chip: str, slices: Sequence[int]) -> Forecast:
    """Compiles a training step for the devices of its partitioner, and computes a lower bound on the step time.

    Args:
        chip: name of the chip, as in TOPOLOGY, such as 'v5e'.
        slices: index of the slice or node of each device, in mesh order.

    Raises:
        UserError: the chip is unknown, or its memory is too small for the step.
    """
    machine = roofline.find_machine(chip)
    try:
        compiled = step_memory.compile_step(step)
    except Exception as error:
        if not step_memory.is_out_of_memory_error(error):
            raise
        raise UserError(
            f'the step does not fit into the memory of a {machine.name}; use --memory instead of --speed '
            'to find changes that make it fit'
        ) from None
    program = compiled_program.parse_program(compiled.as_text(), len(slices))
    # The model is traced without custom kernels, because matrix products inside custom kernels are not counted.
    with compile_for_platform('accelerator'):
        row_counts = model_counts.count_row_costs(step.model, step.batch)
    return Forecast(
        step=step,
        bound=roofline.compute_step_time_bound(program, machine, slices),
        memory=step_memory.read_memory_usage(step, compiled),
        model_flops=step.batch_size * row_counts.training_flops,
        tokens=step.batch_size * row_counts.tokens,
        devices=len(slices),
    )


class RecommendedChange(NamedTuple):
    """A recommended change: the macro, its new value, and the reason."""

    macro: str
    value: str
    reason: str


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
        f'{name}: {format_milliseconds(seconds)} {what} ({seconds / bound.serial_seconds:.0%})'
        for name, what, seconds in sorted(parts, key=lambda part: -part[2])
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


def recommend_changes(forecast: Forecast, available: int | None) -> Iterator[RecommendedChange]:
    """Yields recommended changes, starting with those that have no drawback.

    Args:
        available: memory of a device in bytes, or None to skip the memory check.
    """
    bound, memory, step = forecast.bound, forecast.memory, forecast.step
    float32 = (bound.flops['f32'] + bound.flops['f32 exact']) / max(bound.flops.total(), 1)
    if float32 >= 0.5:
        reason = f'{float32:.0%} of the FLOPs are float32 matrix products, and activations take twice the memory'
        yield RecommendedChange('DTYPE', 'bfloat16', reason)
    yield from _recommend_mesh(forecast, available)
    if available is not None and memory.total + memory.temporaries > available:
        return
    # The following changes may double the memory of activations.
    if step.microbatches % 2 == 0:
        reason = f'each step reads the weights and accumulates gradients {step.microbatches} times'
        yield RecommendedChange('MICROBATCHES', str(step.microbatches // 2), reason)
    recomputing = bound.phase_seconds(RECOMPUTED)
    share, repeated = recomputing / bound.serial_seconds, bound.flops.total() * forecast.devices / forecast.model_flops
    if max(share, repeated - 1) >= _MIN_SAVING:
        reason = f'recomputation takes {format_milliseconds(recomputing)} ({share:.0%}), and '
        yield RecommendedChange('REMAT_POLICY', 'None', f'{reason}the step has {repeated:.2f} times the model FLOPs')
    constant = bound.phase_seconds(UPDATE) + bound.gap_seconds
    share = constant / (bound.serial_seconds + bound.gap_seconds)
    if share >= _MIN_SAVING:
        reason = f'the optimizer and the gaps take {format_milliseconds(constant)} ({share:.0%}) at any batch size'
        yield RecommendedChange('BATCH_SIZE', str(2 * step.batch_size), reason)


def _recommend_mesh(forecast: Forecast, available: int | None) -> Iterator[RecommendedChange]:
    """Recommends another mesh if it saves time: data parallelism if parameters are sharded now, otherwise FSDP."""
    bound, memory = forecast.bound, forecast.memory
    data, fsdp, tensor = forecast.step.partitioner.mesh.shape.values()
    parts, update = fsdp * tensor, bound.phase_seconds(UPDATE)
    # Gradients are counted as a second copy of the parameters with the same sharding.
    state = 2 * memory.parameters + memory.optimizer_state
    if parts > 1:
        needed = memory.total + (parts - 1) * state
        if available is not None and needed > available:
            return
        permutes = sum(
            collective.num_runs for collective in bound.collectives if collective.kind == 'collective-permute'
        )
        # Data parallelism still all-reduces the gradients.
        reduced = 2 * (1 - 1 / forecast.devices) * memory.parameters * parts
        # Half of the collectives are assumed to overlap with kernels. Without sharding, each device updates all
        # parameters.
        saved = (1 - reduced / (bound.bytes_sent or 1)) * bound.collective_seconds / 2 - (parts - 1) * update
        if permutes > _MAX_PERMUTES:
            reason = f'{permutes:,} collective-permutes split the matrix products into small pieces'
        elif bound.bytes_sent > 1.2 * reduced and saved > _MIN_SAVING * bound.serial_seconds:
            sent = f'{bound.bytes_sent / 1e6:,.0f} MB'
            reason = f'each device sends {sent}, and {reduced / 1e6:,.0f} MB if parameters are not sharded'
        else:
            return
        limit = f' of {format_gibibytes(available)}' if available else ''
        yield RecommendedChange(
            'MESH',
            'data=-1',
            f'{reason}; without sharding, the memory of a step would be {format_gibibytes(needed)}{limit}',
        )
    elif data > 1 and not any(collective.link == roofline.NETWORK for collective in bound.collectives):
        # FSDP gathers the parameters twice, so each device sends about twice the bytes, half of them during kernels.
        saved = update * (1 - 1 / data) - bound.collective_seconds / 2
        if saved >= _MIN_SAVING * bound.serial_seconds:
            reason = (
                f'each device updates all parameters, which takes {format_milliseconds(update)}; with fsdp, it updates '
                f'1/{data} of them'
            )
            freed = format_gibibytes(int((1 - 1 / data) * state))
            yield RecommendedChange('MESH', 'fsdp=-1', f'{reason}, and a step needs {freed} less memory')


def format_milliseconds(seconds: float) -> str:
    """Formats seconds as milliseconds with three significant digits, such as `12.3 ms`."""
    return f'{1e3 * seconds:,.3g} ms' if seconds < 1 else f'{1e3 * seconds:,.0f} ms'
