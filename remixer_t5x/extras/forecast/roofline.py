"""Uses a roofline model to compute the minimum time of a compiled program on a machine.

The time of a kernel is the maximum of FLOPs / peak FLOP/s and bytes / HBM bandwidth. The time of a collective is the
number of bytes that a device sends divided by the link bandwidth. A real step takes longer, because kernels do not
reach peak rates, and GPUs have gaps between kernels.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from remixer_t5x.extras.forecast import hlo_costs
from remixer_t5x.extras.forecast.compiled_program import Collective, CompiledProgram, Kernel
from remixer_t5x.extras.forecast.hlo_costs import Flops
from remixer_t5x.extras.forecast.machines import Machine

COMPUTE, HBM, NETWORK = 'compute', 'HBM', 'network'
OPTIMIZER, LOSS = 'optimizer, norms', 'loss'
FORWARD, RECOMPUTED, BACKWARD, UPDATE = 'forward', 'recomputed', 'backward', 'update'
# Operations that XLA adds, such as zero initialization of the arrays that a loop fills.
UNNAMED = 'copies and fills by XLA'

# Matches scopes of a name stack that are not modules: transformations, control flow, einsum equations, and methods such
# as `layer._compute_update`.
_ADDED_SCOPES = re.compile(
    r'.*[(.].*|.*->.*|while|body|cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation|core_call|'
    r'custom_[jv][jv]p_call|custom_vjp_call_jaxpr|pallas_call|shard_map|scan|remat\d?|'
)


class StepLocation(NamedTuple):
    """The location of an operation in the training step.

    Attributes:
        module: path of the Flax module, separated by '/'; OPTIMIZER, LOSS or UNNAMED outside of modules.
        phase: FORWARD, RECOMPUTED, BACKWARD or UPDATE; '-' if unknown.
        primitive: JAX primitive, such as 'dot_general'.
    """

    module: str
    phase: str
    primitive: str


def parse_op_name(op_name: str) -> StepLocation:
    """Parses the name stack of an operation.

    Args:
        op_name: HLO metadata, such as
            `jit(step_fn)/transpose(jvp(EncoderDecoder.encode))/encoder/while/body/checkpoint/run_0/layer/norm/mul`.
    """
    if not op_name:
        return StepLocation(UNNAMED, '-', '-')
    *scopes, primitive = op_name.split('/')
    if not scopes:
        # The op_name of a copied argument is the name of the argument.
        return StepLocation(OPTIMIZER, UPDATE, 'copy')
    modules = '/'.join(scope for scope in scopes if not _ADDED_SCOPES.fullmatch(scope))
    if 'transpose(' in op_name:
        phase = RECOMPUTED if 'rematted_computation' in op_name else BACKWARD
    elif 'jvp(' in op_name:
        phase = FORWARD
    else:
        return StepLocation(modules or OPTIMIZER, UPDATE, primitive)
    return StepLocation(modules or LOSS, phase, primitive)


@dataclasses.dataclass(frozen=True)
class KernelCosts:
    """Kernels that a device runs in a training step, and their total costs."""

    machine: Machine
    kernels: Sequence[Kernel]

    @property
    def flops(self) -> Flops:
        """A mapping from dtypes to total FLOPs."""
        total: Flops = Flops()
        for kernel in self.kernels:
            total.update({dtype: kernel.times * flops for dtype, flops in kernel.flops.items()})
        return total

    @property
    def bytes(self) -> float:
        """HBM traffic in bytes."""
        return sum(kernel.times * kernel.bytes for kernel in self.kernels)

    @property
    def count(self) -> int:
        """The number of kernel runs."""
        return sum(kernel.times for kernel in self.kernels)

    @property
    def seconds(self) -> float:
        """The minimum time of the kernels, without collectives."""
        return sum(kernel.times * max(kernel_seconds(kernel, self.machine)) for kernel in self.kernels)

    @property
    def compute_seconds(self) -> float:
        """The minimum time of the compute-bound kernels; all other kernels are memory-bound."""
        times = ((kernel.times, *kernel_seconds(kernel, self.machine)) for kernel in self.kernels)
        return sum(count * compute for count, compute, memory in times if compute > memory)

    @property
    def limit(self) -> str:
        """The bottleneck: COMPUTE if compute-bound kernels use more than half of the minimum time, otherwise HBM."""
        return COMPUTE if 2 * self.compute_seconds > self.seconds else HBM

    @property
    def estimated_seconds(self) -> float:
        """The TPU compiler's time estimate, summed over the kernels that have one."""
        cycles = sum(kernel.times * (kernel.cycles or 0) for kernel in self.kernels)
        return cycles / self.machine.clock if self.machine.clock else 0.0

    def unestimated_seconds(self) -> collections.Counter[str]:
        """Returns, for each opcode, the minimum time of the kernels that the TPU compiler does not estimate."""
        total: collections.Counter[str] = collections.Counter()
        for kernel in self.kernels:
            if kernel.cycles is None:
                total.update({kernel.op: kernel.times * max(kernel_seconds(kernel, self.machine))})
        return total


@dataclasses.dataclass(frozen=True)
class OperationCosts(KernelCosts):
    """The kernels at one location in the training step."""

    location: StepLocation


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """All collectives of one kind over one type of link.

    Attributes:
        kind: opcode, such as 'all-gather'.
        link: 'ICI' or 'NVLink' within a slice or node, otherwise NETWORK.
        times: number of runs in a step.
        bytes_sent: bytes that each device sends in a step.
        seconds: time at the link bandwidth, or None if the bandwidth is unknown.
    """

    kind: str
    link: str
    group_size: int
    times: int
    bytes_sent: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class StepBound(KernelCosts):
    """The minimum time of a training step on a machine; `operations` and `exchanges` are sorted by decreasing cost."""

    operations: tuple[OperationCosts, ...]
    exchanges: tuple[CollectiveCost, ...]

    @property
    def bytes_sent(self) -> float:
        return sum(exchange.bytes_sent for exchange in self.exchanges)

    @property
    def exchange_seconds(self) -> float:
        return sum(exchange.seconds or 0.0 for exchange in self.exchanges)

    @property
    def overlapped_seconds(self) -> float:
        """The minimum time if all collectives overlap with kernels."""
        return max(self.seconds, self.exchange_seconds)

    @property
    def serial_seconds(self) -> float:
        """The minimum time if no collective overlaps with a kernel."""
        return self.seconds + self.exchange_seconds

    @property
    def gap_seconds(self) -> float:
        """The total time of gaps between kernels, which the bound excludes."""
        return self.count * self.machine.gap

    def phase_seconds(self, phase: str) -> float:
        return sum(operation.seconds for operation in self.operations if operation.location.phase == phase)


def bound_time(program: CompiledProgram, machine: Machine, slices: Sequence[int]) -> StepBound:
    """Computes the minimum time of a program.

    Args:
        slices: index of the slice or node of each device in the program's device assignment.
    """
    kernels_by_location: dict[StepLocation, list[Kernel]] = {}
    for kernel in program.kernels:
        kernels_by_location.setdefault(parse_op_name(kernel.op_name), []).append(kernel)
    operations = [OperationCosts(machine, kernels, location) for location, kernels in kernels_by_location.items()]
    operations.sort(key=lambda operation: -operation.seconds)
    exchanges = _sum_collectives(program.collectives, machine, slices)
    return StepBound(machine, program.kernels, tuple(operations), exchanges)


def kernel_seconds(kernel: Kernel, machine: Machine) -> tuple[float, float]:
    """Returns the compute time and the memory time of one run of a kernel, in seconds."""
    compute = sum(flops / machine.peak(dtype) for dtype, flops in kernel.flops.items())
    return compute, kernel.bytes / machine.bandwidth


def _sum_collectives(
    collectives: Iterable[Collective], machine: Machine, slices: Sequence[int]
) -> tuple[CollectiveCost, ...]:
    times: collections.Counter[tuple[str, str, int]] = collections.Counter()
    sent: dict[tuple[str, str, int], float] = collections.defaultdict(float)
    for collective in collectives:
        kind, members = collective.kind, collective.group_size
        if members == 1:
            continue
        # The slowest link of a group limits the collective.
        crossed = max(len({slices[device] for device in group}) for group in collective.groups)
        key = kind, machine.link_name if crossed == 1 else NETWORK, members
        times[key] += collective.times
        size = hlo_costs.bytes_sent(kind, collective.operand_bytes, members, crossed)
        sent[key] += collective.times * size
    rates = {machine.link_name: machine.link, NETWORK: machine.network}
    exchanges = []
    for (kind, link, members), size in sent.items():
        rate = rates[link]
        exchanges.append(
            CollectiveCost(kind, link, members, times[kind, link, members], size, size / rate if rate else None)
        )
    return tuple(sorted(exchanges, key=lambda exchange: -exchange.bytes_sent))
