"""What limits a training step, and changes that could make it faster, each with its reason from the numbers."""

import dataclasses
from collections.abc import Callable

from remixer_t5x.costs.memory_table import gibibytes
from remixer_t5x.extras.forecast import roofline
from remixer_t5x.extras.forecast.forecast import Forecast
from remixer_t5x.extras.forecast.module_names import RECOMPUTED, UPDATE

# A part of the step below this share is not worth a change.
_WORTHWHILE = 0.03
# A program with more collective-permutes than this has cut its matrix products into pieces (windowed einsums).
_PIECES = 100


@dataclasses.dataclass(frozen=True)
class Advice:
    """One change: the macro and value to set, and why."""

    macro: str
    value: str
    reason: str

    @property
    def typed(self) -> str:
        """What the user types."""
        return f'--mesh={self.value}' if self.macro == 'MESH' else f'--gin.{self.macro}={self.value}'


def limits(found: Forecast) -> list[str]:
    """What limits the step, as sentences, the most important first."""
    bound = found.bound
    parts = [
        ('compute', 'in kernels that fill the matrix units', bound.compute_seconds),
        ('HBM', 'in kernels that wait for memory', bound.kernel_seconds - bound.compute_seconds),
        ('interconnect', 'of collectives, which may run behind the kernels', bound.exchange_seconds),
        (f'gaps between {bound.kernels:,} kernels', '(a guess, not in the bound)', bound.gap_seconds),
    ]
    return [
        f'{name}: {milliseconds(seconds)} {what} ({seconds / bound.serial_seconds:.0%})'
        for name, what, seconds in sorted(parts, key=lambda part: -part[2])
        if seconds > 0
    ]


def uncounted(found: Forecast) -> list[str]:
    """What the numbers leave out: kernels that state no FLOPs, and kernels that the TPU compiler does not estimate."""
    lines = []
    names = sorted({name for operation in found.bound.operations for name in operation.opaque})
    if names:
        lines.append(f'{", ".join(names)} state no FLOPs: only their operands and results are in the bound')
    missing = found.bound.unestimated()
    if found.bound.estimated_seconds and sum(missing.values()) > 0:
        listed = ', '.join(f'{kind} {milliseconds(spent)}' for kind, spent in list(missing.items())[:4])
        lines.append(
            f'without an estimate of the compiler, by the bound: {milliseconds(sum(missing.values()))} ({listed})'
        )
    return lines


def advice(found: Forecast, available: int | None) -> list[Advice]:
    """Changes to try, first what costs nothing.

    Args:
        available: bytes of a device; None if unknown, and then memory is not checked.
    """
    rules: tuple[Callable[[Forecast, int | None], Advice | None], ...] = (
        *(_bfloat16, _plain_data_parallelism, _split_parameters, _fewer_microbatches, _less_remat, _larger_batch),
    )
    return [change for rule in rules if (change := rule(found, available))]


def _bfloat16(found: Forecast, available: int | None) -> Advice | None:
    wide = found.bound.share_of_numbers('f32', 'f32 exact')
    if wide < 0.5:
        return None
    return Advice(
        'DTYPE', 'bfloat16', f'{wide:.0%} of the FLOPs multiply float32, and activations take twice the bytes'
    )


def _plain_data_parallelism(found: Forecast, available: int | None) -> Advice | None:
    data, fsdp, tensor = found.step.partitioner.mesh.shape.values()
    parts = fsdp * tensor
    memory = found.memory
    # Gradients are temporaries that are split like the parameters.
    needed = memory.total + (parts - 1) * (2 * memory.parameters + memory.optimizer_state)
    if parts == 1 or not _fits(needed, available):
        return None
    permutes = sum(each.times for each in found.bound.exchanges if each.kind == 'collective-permute')
    sent = sum(each.sent for each in found.bound.exchanges)
    # An all-reduce of the gradients remains.
    reduced = 2 * (1 - 1 / found.devices) * memory.parameters * parts
    if permutes > _PIECES:
        reason = f'{permutes:,} collective-permutes cut the matrix products into small pieces'
    elif sent > 1.2 * reduced and _saved_unsplit(found, reduced / sent) > _WORTHWHILE * found.bound.serial_seconds:
        reason = f'each device sends {sent / 1e6:,.0f} MB, and {reduced / 1e6:,.0f} MB if parameters are not split'
    else:
        return None
    room = f' of {gibibytes(available)}' if available else ''
    return Advice('MESH', 'data=-1', f'{reason}; unsplit, a step would take {gibibytes(needed)}{room}')


def _saved_unsplit(found: Forecast, remaining: float) -> float:
    """Seconds of the bytes that are not sent, half of which run behind kernels, less those of updating everything."""
    _, fsdp, tensor = found.step.partitioner.mesh.shape.values()
    update = (fsdp * tensor - 1) * found.bound.seconds_of_phase(UPDATE)
    return (1 - remaining) * found.bound.exchange_seconds / 2 - update


def _split_parameters(found: Forecast, available: int | None) -> Advice | None:
    data, fsdp, tensor = found.step.partitioner.mesh.shape.values()
    links = {each.link for each in found.bound.exchanges}
    if data == 1 or fsdp * tensor > 1 or roofline.NETWORK in links:
        return None
    update = found.bound.seconds_of_phase(UPDATE)
    # Parameters are then gathered for both passes, which sends about twice the bytes; half of it runs behind kernels.
    saved = update * (1 - 1 / data) - found.bound.exchange_seconds / 2
    if saved < _WORTHWHILE * found.bound.serial_seconds:
        return None
    freed = (1 - 1 / data) * (2 * found.memory.parameters + found.memory.optimizer_state)
    reason = f'each device updates all parameters, {milliseconds(update)}; split, each updates 1/{data} of them'
    return Advice('MESH', 'fsdp=-1', f'{reason}, and a step takes {gibibytes(int(freed))} less')


def _fewer_microbatches(found: Forecast, available: int | None) -> Advice | None:
    count = found.step.microbatches
    if count % 2 or not _fits(found.memory.total + found.memory.temporaries, available):
        return None
    return Advice('MICROBATCHES', str(count // 2), f'the weights are read and gradients added {count} times a step')


def _less_remat(found: Forecast, available: int | None) -> Advice | None:
    seconds = found.bound.seconds_of_phase(RECOMPUTED)
    repeated = found.bound.flops * found.devices / found.model_flops
    share = seconds / found.bound.serial_seconds
    if max(share, repeated - 1) < _WORTHWHILE or not _fits(found.memory.total + found.memory.temporaries, available):
        return None
    spent = f'recomputing takes {milliseconds(seconds)} ({share:.0%})'
    return Advice('REMAT_POLICY', 'None', f'{spent}, and the step has {repeated:.2f} times the model FLOPs')


def _larger_batch(found: Forecast, available: int | None) -> Advice | None:
    fixed = found.bound.seconds_of_phase(UPDATE) + found.bound.gap_seconds
    share = fixed / (found.bound.serial_seconds + found.bound.gap_seconds)
    if share < _WORTHWHILE or not _fits(found.memory.total + found.memory.temporaries, available):
        return None
    reason = f'the optimizer and gaps take {milliseconds(fixed)} ({share:.0%}) whatever the batch'
    return Advice('BATCH_SIZE', str(2 * found.step.rows), reason)


def _fits(needed: int, available: int | None) -> bool:
    return available is None or needed <= available


def milliseconds(seconds: float) -> str:
    """`12.3 ms`, with three digits."""
    return f'{1e3 * seconds:,.3g} ms' if seconds < 1 else f'{1e3 * seconds:,.0f} ms'
