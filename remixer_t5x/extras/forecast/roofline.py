"""The least time that a compiled program can take on a machine: for each kernel the greater of its FLOPs at the peak
rate and its bytes at the bandwidth of HBM, and for each collective what a device sends at the rate of its link.

A real step takes longer: kernels reach neither peak, and a GPU starts each one with a gap.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from remixer_t5x.extras.forecast import hlo_collectives, module_names
from remixer_t5x.extras.forecast.compiled_program import Collective, CompiledProgram, Kernel
from remixer_t5x.extras.forecast.machines import Machine
from remixer_t5x.extras.forecast.module_names import Place

COMPUTE, HBM = 'compute', 'HBM'
NETWORK = 'network'


@dataclasses.dataclass(frozen=True)
class Operation:
    """Kernels of one place in the training step, together, over a step on one device.

    Attributes:
        place: module, phase and primitive.
        seconds: the roofline.
        flops: by the type of number.
        bytes: between HBM and the core.
        times: how many kernels run.
        estimated: seconds by the TPU compiler, of the kernels that it estimates.
        unestimated: seconds of the kernels that it does not estimate, by what they run.
        compute_seconds: the part of the roofline in kernels that compute limits; HBM limits the rest.
        opaque: names of custom kernels that have no estimate of their FLOPs.
    """

    place: Place
    seconds: float
    flops: Mapping[str, float]
    bytes: float
    times: int
    estimated: float
    unestimated: Mapping[str, float]
    compute_seconds: float
    opaque: frozenset[str]

    @property
    def limit(self) -> str:
        """COMPUTE or HBM, whichever limits most of the time."""
        return COMPUTE if 2 * self.compute_seconds > self.seconds else HBM


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Collectives of one kind over one link, together.

    Attributes:
        kind: 'all-gather', ...
        link: the machine's link or NETWORK.
        members: how many devices exchange data with each other.
        times: how many run in a step.
        sent: bytes that each device sends in a step.
        seconds: at the rate of the link; None if it is unknown.
    """

    kind: str
    link: str
    members: int
    times: int
    sent: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Bound:
    """A training step on a machine, at best."""

    machine: Machine
    operations: tuple[Operation, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def flops(self) -> float:
        return sum(sum(operation.flops.values()) for operation in self.operations)

    @property
    def bytes(self) -> float:
        return sum(operation.bytes for operation in self.operations)

    @property
    def kernels(self) -> int:
        return sum(operation.times for operation in self.operations)

    @property
    def kernel_seconds(self) -> float:
        return sum(operation.seconds for operation in self.operations)

    @property
    def exchange_seconds(self) -> float:
        return sum(exchange.seconds or 0.0 for exchange in self.exchanges)

    @property
    def estimated_seconds(self) -> float:
        return sum(operation.estimated for operation in self.operations)

    @property
    def best_seconds(self) -> float:
        """All collectives run behind the kernels."""
        return max(self.kernel_seconds, self.exchange_seconds)

    @property
    def serial_seconds(self) -> float:
        """No collective runs behind a kernel."""
        return self.kernel_seconds + self.exchange_seconds

    @property
    def compute_seconds(self) -> float:
        """Seconds of the kernels that compute limits; HBM limits the others."""
        return sum(operation.compute_seconds for operation in self.operations)

    @property
    def gap_seconds(self) -> float:
        """Gaps between kernels, which are not in the bound."""
        return self.kernels * self.machine.gap

    def share_of_numbers(self, *numbers: str) -> float:
        """The share of the FLOPs that these types of numbers have."""
        chosen = sum(operation.flops.get(number, 0.0) for operation in self.operations for number in numbers)
        return chosen / self.flops if self.flops else 0.0

    def unestimated(self) -> dict[str, float]:
        """Seconds of the kernels that the TPU compiler does not estimate, by what they run, the dearest first."""
        total: dict[str, float] = {}
        for operation in self.operations:
            for kind, spent in operation.unestimated.items():
                total[kind] = total.get(kind, 0.0) + spent
        return dict(sorted(total.items(), key=lambda part: -part[1]))

    def seconds_of_phase(self, phase: str) -> float:
        """Seconds of the kernels of a phase of `module_names`."""
        return sum(operation.seconds for operation in self.operations if operation.place.phase == phase)


def bound(program: CompiledProgram, machine: Machine, slices: Sequence[int]) -> Bound:
    """The bound of a program.

    Args:
        slices: for each device of the program's assignment, its slice or node.
    """
    return Bound(machine, _operations(program.kernels, machine), _exchanges(program.collectives, machine, slices))


def seconds(kernel: Kernel, machine: Machine) -> tuple[float, float]:
    """Compute and memory seconds of one run."""
    compute = sum(flops / machine.peak(number) for number, flops in kernel.flops.items())
    return compute, kernel.bytes / machine.bandwidth


def _operations(kernels: Iterable[Kernel], machine: Machine) -> tuple[Operation, ...]:
    """The dearest first."""
    groups: dict[Place, list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault(module_names.place(kernel.op_name), []).append(kernel)
    made = (_operation(place, group, machine) for place, group in groups.items())
    return tuple(sorted(made, key=lambda operation: -operation.seconds))


def _operation(place: Place, kernels: Sequence[Kernel], machine: Machine) -> Operation:
    limits = {COMPUTE: 0.0, HBM: 0.0}
    for kernel in kernels:
        compute, memory = seconds(kernel, machine)
        limits[COMPUTE if compute > memory else HBM] += kernel.times * max(compute, memory)
    cycles = sum(kernel.times * (kernel.cycles or 0) for kernel in kernels)
    return Operation(
        place=place,
        seconds=sum(limits.values()),
        flops=_flops(kernels),
        bytes=sum(kernel.times * kernel.bytes for kernel in kernels),
        times=sum(kernel.times for kernel in kernels),
        estimated=cycles / machine.clock if machine.clock else 0.0,
        unestimated=_unestimated(kernels, machine),
        compute_seconds=limits[COMPUTE],
        opaque=frozenset(kernel.op for kernel in kernels if kernel.is_opaque),
    )


def _unestimated(kernels: Sequence[Kernel], machine: Machine) -> dict[str, float]:
    total: dict[str, float] = {}
    for kernel in kernels:
        if kernel.cycles is None:
            total[kernel.op] = total.get(kernel.op, 0.0) + kernel.times * max(seconds(kernel, machine))
    return total


def _flops(kernels: Sequence[Kernel]) -> dict[str, float]:
    total: dict[str, float] = {}
    for kernel in kernels:
        for number, flops in kernel.flops.items():
            total[number] = total.get(number, 0.0) + kernel.times * flops
    return total


def _exchanges(collectives: Iterable[Collective], machine: Machine, slices: Sequence[int]) -> tuple[Exchange, ...]:
    """The dearest first."""
    totals: dict[tuple[str, str, int], tuple[int, float]] = {}
    for collective in collectives:
        if collective.members == 1:
            continue
        link, sent = _link(collective, machine, slices)
        key = (collective.kind, link, collective.members)
        times, before = totals.get(key, (0, 0.0))
        totals[key] = times + collective.times, before + collective.times * sent
    made = []
    for (kind, link, members), (times, sent) in totals.items():
        rate = machine.network if link == NETWORK else machine.link
        made.append(Exchange(kind, link, members, times, sent, sent / rate if rate else None))
    return tuple(sorted(made, key=lambda exchange: -exchange.sent))


def _link(collective: Collective, machine: Machine, slices: Sequence[int]) -> tuple[str, float]:
    """The slowest link that a collective crosses, and the bytes that a device sends over it in one run."""
    crossed = max(len({slices[device] for device in group}) for group in collective.groups)
    if crossed == 1:
        return machine.link_name, collective.sent
    between = hlo_collectives.bytes_sent_between(collective.kind, collective.given, collective.members, crossed)
    return NETWORK, between
