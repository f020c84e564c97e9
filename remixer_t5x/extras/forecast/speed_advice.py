"""Names what limits a training step, and changes that could make it faster, each with its reason from the numbers."""

import dataclasses
from collections.abc import Iterator

from remixer_t5x.costs.step_memory import gibibytes
from remixer_t5x.extras.forecast import roofline
from remixer_t5x.extras.forecast.forecast import Forecast
from remixer_t5x.extras.forecast.roofline import RECOMPUTED, UPDATE

# Changes that could save less than this share of the step are not advised.
_WORTHWHILE = 0.03
# A program with more collective-permutes has its matrix products split into pieces (windowed einsums).
_MANY_PERMUTES = 100


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
