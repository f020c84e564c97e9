"""Uses a roofline model (Williams et al. 2009) to compute the minimum time of a compiled program on a machine.

The time of a kernel is the maximum of FLOPs / peak FLOP/s and bytes / HBM bandwidth. The time of a collective is the
number of bytes that a device sends divided by the link bandwidth. A real step takes longer, because kernels do not
reach peak rates, and GPUs have gaps between kernels.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from remixer_t5x.devices.chips import Chip
from remixer_t5x.extras.forecast.compiled_program import Collective, CompiledProgram, Kernel
from remixer_t5x.extras.forecast.hlo_costs import Flops

COMPUTE, HBM, NETWORK = 'compute', 'HBM', 'network'
OPTIMIZER, LOSS = 'optimizer, norms', 'loss'
FORWARD, RECOMPUTED, BACKWARD, UPDATE = 'forward', 'recomputed', 'backward', 'update'
# Operations that XLA adds, such as zero initialization of the arrays that a loop fills.
UNNAMED = 'copies and fills by XLA'

# Matches scopes of a name stack that are not modules: transformations, control flow, einsum equations, and methods such
# as `layer._compute_update`.
_ADDED_SCOPES = re.compile(
    r'.*[(.].*|.*->.*|while|body|cond|branch_\d+_fun|closed_call|checkpoint|rematted_computation|core_call|'
    r'custom_[jv][jv]p_call|custom_vjp_call_jaxpr|eval_jaxpr|pallas_call|shard_map|scan|remat\d?|'
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

    chip: Chip
    kernels: Sequence[Kernel]

    @property
    def flops(self) -> Flops:
        """A mapping from dtypes to total FLOPs."""
        total: Flops = Flops()
        for kernel in self.kernels:
            total.update({dtype: kernel.num_runs * flops for dtype, flops in kernel.flops.items()})
        return total

    @property
    def hbm_bytes(self) -> float:
        return sum(kernel.num_runs * kernel.bytes for kernel in self.kernels)

    @property
    def num_kernel_runs(self) -> int:
        return sum(kernel.num_runs for kernel in self.kernels)

    @property
    def kernel_seconds(self) -> float:
        """The minimum time of the kernels, without collectives."""
        return sum(kernel.num_runs * max(compute_kernel_times(kernel, self.chip)) for kernel in self.kernels)

    @property
    def compute_seconds(self) -> float:
        """The minimum time of the compute-bound kernels; all other kernels are memory-bound."""
        seconds = ((kernel.num_runs, *compute_kernel_times(kernel, self.chip)) for kernel in self.kernels)
        return sum(num_runs * compute for num_runs, compute, memory in seconds if compute > memory)

    @property
    def bottleneck(self) -> str:
        """The bottleneck: COMPUTE if compute-bound kernels use more than half of the minimum time, otherwise HBM."""
        return COMPUTE if 2 * self.compute_seconds > self.kernel_seconds else HBM

    @property
    def estimated_seconds(self) -> float:
        """The TPU compiler's time estimate, summed over the kernels that have one."""
        cycles = sum(kernel.num_runs * (kernel.cycles or 0) for kernel in self.kernels)
        return cycles / self.chip.clock if self.chip.clock else 0.0

    def unestimated_seconds(self) -> collections.Counter[str]:
        """Returns, for each opcode, the minimum time of the kernels without a time estimate from the TPU compiler."""
        total: collections.Counter[str] = collections.Counter()
        for kernel in self.kernels:
            if kernel.cycles is None:
                total.update({kernel.op: kernel.num_runs * max(compute_kernel_times(kernel, self.chip))})
        return total


@dataclasses.dataclass(frozen=True)
class OperationCosts(KernelCosts):
    """The kernels at one location in the training step."""

    location: StepLocation


@dataclasses.dataclass
class CollectiveCost:
    """All collectives of one kind over one type of link.

    Attributes:
        kind: opcode, such as 'all-gather'.
        link: 'ICI' or 'NVLink' within a slice or node, otherwise NETWORK.
        bandwidth: bytes per second of the link, or None if unknown.
        num_runs: number of runs in a step.
        bytes_sent: bytes that each device sends in a step.
    """

    kind: str
    link: str
    group_size: int
    bandwidth: float | None
    num_runs: int = 0
    bytes_sent: float = 0.0

    @property
    def seconds(self) -> float | None:
        return self.bytes_sent / self.bandwidth if self.bandwidth else None


@dataclasses.dataclass(frozen=True)
class StepTimeBound(KernelCosts):
    """The minimum time of a step on a machine; `operations` and `collectives` are sorted by decreasing cost."""

    operations: tuple[OperationCosts, ...]
    collectives: tuple[CollectiveCost, ...]

    @property
    def bytes_sent(self) -> float:
        return sum(collective.bytes_sent for collective in self.collectives)

    @property
    def collective_seconds(self) -> float:
        return sum(collective.seconds or 0.0 for collective in self.collectives)

    @property
    def overlapped_seconds(self) -> float:
        """The minimum time if all collectives overlap with kernels."""
        return max(self.kernel_seconds, self.collective_seconds)

    @property
    def serial_seconds(self) -> float:
        """The minimum time if no collective overlaps with a kernel."""
        return self.kernel_seconds + self.collective_seconds

    @property
    def gap_seconds(self) -> float:
        """The total time of gaps between kernels, which the bound excludes."""
        return self.num_kernel_runs * self.chip.gap


def compute_step_time_bound(program: CompiledProgram, chip: Chip, slices: Sequence[int]) -> StepTimeBound:
    """Computes the minimum time of a program.

    Args:
        slices: index of the slice or node of each device in the program's device assignment.
    """
    kernels_by_location: dict[StepLocation, list[Kernel]] = {}
    for kernel in program.kernels:
        kernels_by_location.setdefault(parse_op_name(kernel.op_name), []).append(kernel)
    operations = [OperationCosts(chip, kernels, location) for location, kernels in kernels_by_location.items()]
    operations.sort(key=lambda operation: -operation.kernel_seconds)
    collectives = _sum_collectives(program.collectives, chip, slices)
    return StepTimeBound(chip, program.kernels, tuple(operations), collectives)


def compute_kernel_times(kernel: Kernel, chip: Chip) -> tuple[float, float]:
    """Returns the compute time and the memory time of one run of a kernel, in seconds."""
    compute = sum(flops / chip.peak_flops_per_second(dtype) for dtype, flops in kernel.flops.items())
    return compute, kernel.bytes / chip.bandwidth


def _sum_collectives(
    collectives: Iterable[Collective], chip: Chip, slices: Sequence[int]
) -> tuple[CollectiveCost, ...]:
    rates = {chip.link_name: chip.link, NETWORK: chip.network}
    costs: dict[tuple[str, str, int], CollectiveCost] = {}
    for collective in collectives:
        kind, members = collective.kind, collective.group_size
        if members == 1:
            continue
        # The slowest link of a group limits the collective.
        crossed = max(len({slices[device] for device in group}) for group in collective.groups)
        link = chip.link_name if crossed == 1 else NETWORK
        cost = costs.setdefault((kind, link, members), CollectiveCost(kind, link, members, rates[link]))
        cost.num_runs += collective.num_runs
        cost.bytes_sent += collective.num_runs * collective.count_bytes_sent(crossed)
    return tuple(sorted(costs.values(), key=lambda cost: -cost.bytes_sent))
