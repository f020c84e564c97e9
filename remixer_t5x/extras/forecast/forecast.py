"""Forecasts a training step: its minimum time on a machine, memory, limits, and changes that could help."""

import dataclasses
from collections.abc import Iterator, Sequence

from remixer_t5x.costs import counts, step_memory
from remixer_t5x.costs.step_memory import Step, StepMemory, gibibytes
from remixer_t5x.errors import UserError
from remixer_t5x.extras.forecast import compiled_program, machines, roofline
from remixer_t5x.extras.forecast.roofline import RECOMPUTED, UPDATE, Bound
from remixer_t5x.kernels.compile_target import compiling_for

# Changes that could save less than this share of the step are not advised.
_WORTHWHILE = 0.03
# A program with more collective-permutes has its matrix products split into pieces (windowed einsums).
_MANY_PERMUTES = 100


@dataclasses.dataclass(frozen=True)
class Forecast:
    """A compiled training step.

    Attributes:
        step: what was compiled.
        bound: of one device.
        memory: of one device.
        model_flops: FLOPs of a step by the model's equations, three forward passes, over all devices.
        tokens: input and target tokens of a global batch, with padding.
        devices: how many.
    """

    step: Step
    bound: Bound
    memory: StepMemory
    model_flops: float
    tokens: int
    devices: int

    def mfu(self, seconds: float) -> float:
        """The share of the peak that the model's FLOPs use (Chowdhery et al. 2022, "PaLM") in a step of `seconds`."""
        return self.model_flops / (seconds * self.devices * self.bound.machine.peak('bf16'))

    def dollars_per_million_tokens(self, seconds: float, price: float) -> float:
        """The cost of a million tokens at `price` dollars for a chip and hour."""
        chips = self.devices / self.bound.machine.devices_per_chip
        return price * chips * seconds / 3600 / self.tokens * 1e6


def forecast(step: Step, chip: str, slices: Sequence[int]) -> Forecast:
    """Compiles a step for its partitioner's devices, and bounds its time.

    Args:
        chip: as in a topology.
        slices: the slice or node of each device, in the order of the mesh.

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
            f'the step does not fit into the memory of a {machine.name}; type --memory in place of --speed, '
            'which finds changes with which it fits'
        ) from None
    program = compiled_program.read(compiled.as_text(), len(slices))
    # Kernels hide their products, so the FLOPs of the equations are counted without them.
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
    """A change: the macro and value to set, and the reason."""

    macro: str
    value: str
    reason: str

    @property
    def flag(self) -> str:
        """What the user types."""
        return f'--mesh={self.value}' if self.macro == 'MESH' else f'--gin.{self.macro}={self.value}'


def describe_limits(forecast: Forecast) -> list[str]:
    """Sentences that name what limits the step, starting with the most important."""
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
    """Sentences about kernels that report no FLOPs, and kernels that the TPU compiler does not estimate."""
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
        available: bytes of a device; None if unknown, and then memory is not checked.
    """
    bound, memory, step = forecast.bound, forecast.memory, forecast.step
    float32 = (bound.flops['f32'] + bound.flops['f32 exact']) / max(bound.flops.total(), 1)
    if float32 >= 0.5:
        reason = f'{float32:.0%} of the FLOPs multiply float32, and activations take twice the bytes'
        yield Advice('DTYPE', 'bfloat16', reason)
    yield from _advise_mesh(forecast, available)
    if available is not None and memory.total + memory.temporaries > available:
        return
    # What follows may take as much memory for activations again.
    if step.microbatches % 2 == 0:
        reason = f'the weights are read and gradients added {step.microbatches} times a step'
        yield Advice('MICROBATCHES', str(step.microbatches // 2), reason)
    recomputing = bound.phase_seconds(RECOMPUTED)
    share, repeated = recomputing / bound.serial_seconds, bound.flops.total() * forecast.devices / forecast.model_flops
    if max(share, repeated - 1) >= _WORTHWHILE:
        reason = f'recomputing takes {milliseconds(recomputing)} ({share:.0%}), and the step has {repeated:.2f} times'
        yield Advice('REMAT_POLICY', 'None', f'{reason} the model FLOPs')
    constant = bound.phase_seconds(UPDATE) + bound.gap_seconds
    share = constant / (bound.serial_seconds + bound.gap_seconds)
    if share >= _WORTHWHILE:
        reason = f'the optimizer and gaps take {milliseconds(constant)} ({share:.0%}), whatever the batch'
        yield Advice('BATCH_SIZE', str(2 * step.rows), reason)


def _advise_mesh(forecast: Forecast, available: int | None) -> Iterator[Advice]:
    """Yields plain data parallelism for a mesh that splits parameters, or split parameters for one that does not."""
    bound, memory = forecast.bound, forecast.memory
    data, fsdp, tensor = forecast.step.partitioner.mesh.shape.values()
    parts, update = fsdp * tensor, bound.phase_seconds(UPDATE)
    # Gradients are temporaries that are split like the parameters.
    state = 2 * memory.parameters + memory.optimizer_state
    if parts > 1:
        needed = memory.total + (parts - 1) * state
        if available is not None and needed > available:
            return
        permutes = sum(exchange.times for exchange in bound.exchanges if exchange.kind == 'collective-permute')
        # An all-reduce of the gradients remains.
        reduced = 2 * (1 - 1 / forecast.devices) * memory.parameters * parts
        # Half of the collectives overlap with kernels, and each device updates all parameters.
        saved = (1 - reduced / (bound.bytes_sent or 1)) * bound.exchange_seconds / 2 - (parts - 1) * update
        if permutes > _MANY_PERMUTES:
            reason = f'{permutes:,} collective-permutes split the matrix products into small pieces'
        elif bound.bytes_sent > 1.2 * reduced and saved > _WORTHWHILE * bound.serial_seconds:
            sent = f'{bound.bytes_sent / 1e6:,.0f} MB'
            reason = f'each device sends {sent}, and {reduced / 1e6:,.0f} MB if parameters are not split'
        else:
            return
        limit = f' of {gibibytes(available)}' if available else ''
        yield Advice('MESH', 'data=-1', f'{reason}; unsplit, a step would take {gibibytes(needed)}{limit}')
    elif data > 1 and not any(exchange.link == roofline.NETWORK for exchange in bound.exchanges):
        # Gathering parameters for both passes sends about twice the bytes, half of which overlap with kernels.
        saved = update * (1 - 1 / data) - bound.exchange_seconds / 2
        if saved >= _WORTHWHILE * bound.serial_seconds:
            reason = f'each device updates all parameters, {milliseconds(update)}; split, each updates 1/{data} of them'
            freed = gibibytes(int((1 - 1 / data) * state))
            yield Advice('MESH', 'fsdp=-1', f'{reason}, and a step takes {freed} less')


def milliseconds(seconds: float) -> str:
    """`12.3 ms`, with three digits."""
    return f'{1e3 * seconds:,.3g} ms' if seconds < 1 else f'{1e3 * seconds:,.0f} ms'
