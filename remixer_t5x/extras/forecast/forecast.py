"""Forecasts a training step on a machine: minimum time, memory, limits, and changes that could help."""

import dataclasses
from collections.abc import Iterator, Sequence

from remixer_t5x.costs import counts, step_memory
from remixer_t5x.costs.step_memory import Step, StepMemory, gibibytes
from remixer_t5x.errors import UserError
from remixer_t5x.extras.forecast import compiled_program, machines, roofline
from remixer_t5x.extras.forecast.roofline import RECOMPUTED, UPDATE, Bound
from remixer_t5x.kernels.compile_target import compiling_for

# Changes that save less than this share of the step are not advised.
_MIN_SAVING = 0.03
# XLA has split matrix products into windowed einsums if a program has more collective-permutes.
_MAX_PERMUTES = 100


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A compiled training step.

    Attributes:
        step: the step that was compiled.
        bound: roofline of one device.
        memory: memory of one device.
        model_flops: FLOPs of a step on all devices, from the model's equations (three forward passes).
        tokens: input and target tokens of a global batch, with padding.
        devices: number of devices.
    """

    step: Step
    bound: Bound
    memory: StepMemory
    model_flops: float
    tokens: int
    devices: int

    def mfu(self, seconds: float) -> float:
        """Returns the model FLOPs utilization (Chowdhery et al. 2022, "PaLM") of a step of `seconds`."""
        return self.model_flops / (seconds * self.devices * self.bound.machine.peak('bf16'))

    def dollars_per_million_tokens(self, seconds: float, price: float) -> float:
        """Returns the cost of a million tokens at a `price` in dollars per chip and hour."""
        chips = self.devices / self.bound.machine.devices_per_chip
        return price * chips * seconds / 3600 / self.tokens * 1e6


def forecast(step: Step, chip: str, slices: Sequence[int]) -> Forecast:
    """Compiles a step for its partitioner's devices, and bounds its time.

    Args:
        step: the step to compile.
        chip: chip name, as in a topology.
        slices: slice or node of each device, in the order of the mesh.

    Raises:
        UserError: the chip is unknown, or its memory is too small for the step.
    """
    machine = machines.find(chip)
    try:
        compiled = step_memory.compile_step(step)
    except Exception as error:
        if not step_memory.is_out_of_memory(error):
            raise
        raise UserError(
            f'the step does not fit into the memory of a {machine.name}; type --memory instead of --speed '
            'to find changes with which it fits'
        ) from None
    program = compiled_program.read(compiled.as_text(), len(slices))
    # Traced without kernels, because matrix products inside kernels cannot be counted.
    with compiling_for('accelerator'):
        row_counts = counts.count_row(step.model, step.batch)
    return Forecast(
        step=step,
        bound=roofline.bound(program, machine, slices),
        memory=step_memory.read_memory(step, compiled),
        model_flops=step.rows * row_counts.training_flops,
        tokens=step.rows * row_counts.tokens,
        devices=len(slices),
    )


@dataclasses.dataclass(frozen=True)
class Advice:
    """An advised change: the macro, its new value, and the reason."""

    macro: str
    value: str
    reason: str

    @property
    def flag(self) -> str:
        """The command-line flag of the change."""
        return f'--mesh={self.value}' if self.macro == 'MESH' else f'--gin.{self.macro}={self.value}'


def describe_limits(forecast: Forecast) -> list[str]:
    """Describes what limits the step, starting with the most important limit."""
    bound = forecast.bound
    parts = [
        ('compute', 'in kernels that fill the matrix units', bound.compute_seconds),
        ('HBM', 'in kernels that wait for memory', bound.seconds - bound.compute_seconds),
        ('interconnect', 'of collectives, which may overlap with the kernels', bound.exchange_seconds),
        (f'gaps between {bound.count:,} kernels', '(a guess, not in the bound)', bound.gap_seconds),
    ]
    return [
        f'{name}: {milliseconds(seconds)} {what} ({seconds / bound.serial_seconds:.0%})'
        for name, what, seconds in sorted(parts, key=lambda part: -part[2])
        if seconds > 0
    ]


def describe_uncounted(forecast: Forecast) -> list[str]:
    """Describes kernels that report no FLOPs, and kernels without an estimate of the TPU compiler."""
    lines, bound = [], forecast.bound
    names = sorted({kernel.op for kernel in bound.kernels if kernel.is_opaque})
    if names:
        lines.append(f'{", ".join(names)} report no FLOPs: only their operands and results are in the bound')
    missing = bound.unestimated_seconds()
    if bound.estimated_seconds and missing.total() > 0:
        listed = ', '.join(f'{op} {milliseconds(seconds)}' for op, seconds in missing.most_common(4))
        lines.append(f"without the compiler's estimate, by the bound: {milliseconds(missing.total())} ({listed})")
    return lines


def advise(forecast: Forecast, available: int | None) -> Iterator[Advice]:
    """Yields changes to try, starting with those that cost nothing.

    Args:
        forecast: forecast of the current step.
        available: memory of a device in bytes; None disables the check of memory.
    """
    bound, memory, step = forecast.bound, forecast.memory, forecast.step
    float32 = (bound.flops['f32'] + bound.flops['f32 exact']) / max(bound.flops.total(), 1)
    if float32 >= 0.5:
        reason = f'{float32:.0%} of the FLOPs multiply float32, and activations take twice the bytes'
        yield Advice('DTYPE', 'bfloat16', reason)
    yield from _advise_mesh(forecast, available)
    if available is not None and memory.total + memory.temporaries > available:
        return
    # The following changes may double the memory of activations.
    if step.microbatches % 2 == 0:
        reason = f'each step reads the weights and adds gradients {step.microbatches} times'
        yield Advice('MICROBATCHES', str(step.microbatches // 2), reason)
    recomputing = bound.phase_seconds(RECOMPUTED)
    share, repeated = recomputing / bound.serial_seconds, bound.flops.total() * forecast.devices / forecast.model_flops
    if max(share, repeated - 1) >= _MIN_SAVING:
        reason = f'recomputation takes {milliseconds(recomputing)} ({share:.0%}), and the step has {repeated:.2f} times'
        yield Advice('REMAT_POLICY', 'None', f'{reason} the model FLOPs')
    constant = bound.phase_seconds(UPDATE) + bound.gap_seconds
    share = constant / (bound.serial_seconds + bound.gap_seconds)
    if share >= _MIN_SAVING:
        reason = f'the optimizer and gaps take {milliseconds(constant)} ({share:.0%}) for any batch size'
        yield Advice('BATCH_SIZE', str(2 * step.rows), reason)


def _advise_mesh(forecast: Forecast, available: int | None) -> Iterator[Advice]:
    """Yields data parallelism for a mesh with sharded parameters, and FSDP for a mesh without."""
    bound, memory = forecast.bound, forecast.memory
    data, fsdp, tensor = forecast.step.partitioner.mesh.shape.values()
    parts, update = fsdp * tensor, bound.phase_seconds(UPDATE)
    # Gradients are temporaries, sharded like the parameters.
    state = 2 * memory.parameters + memory.optimizer_state
    if parts > 1:
        needed = memory.total + (parts - 1) * state
        if available is not None and needed > available:
            return
        permutes = sum(exchange.times for exchange in bound.exchanges if exchange.kind == 'collective-permute')
        # Data parallelism still all-reduces the gradients.
        reduced = 2 * (1 - 1 / forecast.devices) * memory.parameters * parts
        # Assumes that half of the collectives overlap with kernels. Each device then updates all parameters.
        saved = (1 - reduced / (bound.bytes_sent or 1)) * bound.exchange_seconds / 2 - (parts - 1) * update
        if permutes > _MAX_PERMUTES:
            reason = f'{permutes:,} collective-permutes split the matrix products into small pieces'
        elif bound.bytes_sent > 1.2 * reduced and saved > _MIN_SAVING * bound.serial_seconds:
            sent = f'{bound.bytes_sent / 1e6:,.0f} MB'
            reason = f'each device sends {sent}, and {reduced / 1e6:,.0f} MB if parameters are not sharded'
        else:
            return
        limit = f' of {gibibytes(available)}' if available else ''
        yield Advice('MESH', 'data=-1', f'{reason}; unsharded, a step would take {gibibytes(needed)}{limit}')
    elif data > 1 and not any(exchange.link == roofline.NETWORK for exchange in bound.exchanges):
        # FSDP gathers the parameters twice, which sends about twice the bytes. Half of them overlap with kernels.
        saved = update * (1 - 1 / data) - bound.exchange_seconds / 2
        if saved >= _MIN_SAVING * bound.serial_seconds:
            reason = (
                f'each device updates all parameters, {milliseconds(update)}; sharded, each updates 1/{data} of them'
            )
            freed = gibibytes(int((1 - 1 / data) * state))
            yield Advice('MESH', 'fsdp=-1', f'{reason}, and a step takes {freed} less')


def milliseconds(seconds: float) -> str:
    """Formats seconds as milliseconds with three significant digits, such as `12.3 ms`."""
    return f'{1e3 * seconds:,.3g} ms' if seconds < 1 else f'{1e3 * seconds:,.0f} ms'
