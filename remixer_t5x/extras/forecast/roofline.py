"""Uses a roofline model (Williams et al. 2009) to compute the minimum time of a compiled program on a machine.

The time of a kernel is the maximum of FLOPs / peak FLOP/s and bytes / HBM bandwidth. The time of a collective is the
number of bytes that a device sends divided by the link bandwidth. A real step takes longer, because kernels do not
reach peak rates, and GPUs have gaps between kernels.

Also lists published peak rates of accelerators.

TPUs: docs.cloud.google.com/tpu/docs/ (v3, v4, v5e, v5p, v6e, tpu7x) lists the peak FLOP/s and HBM bandwidth of a chip.
The bandwidth of a link in one direction is half of the listed bidirectional bandwidth. The pages of v3 and v4 do not
list the link bandwidth, so we divide the all-reduce bandwidth of a Pod by its number of chips, which reproduces the
listed values for v5e and v6e. The network bandwidth of a chip is the data center network bandwidth of a Pod divided
by its number of chips. Clock rates are computed from the peak rate and the number of matrix units, each with 128 x 128
multiply-adds per cycle. We assume four units of 256 x 256 for v6e, and four for each of the two devices of tpu7x.

For GPUs, the rates are from NVIDIA's data sheets, without sparsity, for the SXM form factor. The network bandwidth is
that of DGX systems, with one network adapter per GPU. The gap of one microsecond between consecutive kernels is an
assumption.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from remixer_t5x.errors import UserError
from remixer_t5x.extras.forecast.compiled_program import Collective, CompiledProgram, Kernel
from remixer_t5x.extras.forecast.hlo_costs import EXACT_FLOAT32, Flops

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


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peak rates of one JAX device, which is a chip, or half a chip for TPU v3 and TPU7x.

    Attributes:
        name: display name.
        peaks: FLOP/s of matrix products by dtype; other dtypes use the lowest of these rates.
        bandwidth: bytes per second between HBM and the core.
        link: bytes per second that a device can send within its slice or node.
        link_name: 'ICI' or 'NVLink'.
        network: bytes per second that a device can send to other slices or nodes; None if unknown.
        clock: clock rate of a TPU in Hz, to convert the compiler's estimates from cycles to seconds; None for GPUs.
        devices_per_chip: number of JAX devices per chip; prices are per chip.
        gap: seconds between consecutive kernels; 0 for a TPU, which runs a single program.
    """

    name: str
    peaks: Mapping[str, float]
    bandwidth: float
    link: float
    link_name: str
    network: float | None
    clock: float | None = None
    devices_per_chip: int = 1
    gap: float = 0.0

    def peak_flops_per_second(self, dtype: str) -> float:
        return self.peaks.get(dtype, min(self.peaks.values()))


def _make_tpu(
    name: str, peak: float, bandwidth: float, link: float, network: float | None, clock: float, cores: int = 1
):
    # By default, a TPU rounds float32 operands to bfloat16; the highest precision needs six bfloat16 products.
    peaks = {'bf16': peak, 'f16': peak, 'f32': peak, 's8': peak, EXACT_FLOAT32: peak / 6}
    return Machine(name, peaks, bandwidth, link, 'ICI', network, clock, cores)


def _make_gpu(name: str, bfloat16: float, tf32: float, float32: float, bandwidth: float, link: float, network: float):
    # By default, JAX multiplies float32 matrices in TF32 on these GPUs.
    peaks = {'bf16': bfloat16, 'f16': bfloat16, 'f32': tf32, EXACT_FLOAT32: float32}
    return Machine(name, peaks, bandwidth, link, 'NVLink', network, gap=1e-6)


MACHINES = {
    # Each device is half of a chip with 123 TFLOP/s, 900 GB/s to HBM and 332 GB/s to other chips.
    'v3': _make_tpu('TPU v3 core', 61.5e12, 450e9, 166e9, None, 0.94e9, 2),
    'v4': _make_tpu('TPU v4', 275e12, 1200e9, 268e9, None, 1.05e9),
    'v5e': _make_tpu('TPU v5e', 197e12, 819e9, 200e9, 3.1e9, 1.5e9),
    'v5p': _make_tpu('TPU v5p', 459e12, 2765e9, 600e9, 6.25e9, 1.75e9),
    'v6e': _make_tpu('TPU v6e', 918e12, 1638e9, 400e9, None, 1.75e9),
    # Each device is half of a chip with 2307 TFLOP/s, 7380 GB/s to HBM, 600 GB/s to other chips (in one direction)
    # and 12.5 GB/s to the network.
    'v7x': _make_tpu('TPU7x (Ironwood) chiplet', 1153.5e12, 3690e9, 300e9, 6.25e9, 2.2e9, 2),
    'a100': _make_gpu('A100 80 GB SXM', 312e12, 156e12, 19.5e12, 2039e9, 300e9, 25e9),
    'h100': _make_gpu('H100 80 GB SXM', 989e12, 494e12, 67e12, 3350e9, 450e9, 50e9),
    'h200': _make_gpu('H200 141 GB SXM', 989e12, 494e12, 67e12, 4800e9, 450e9, 50e9),
    'b200': _make_gpu('B200 180 GB SXM', 2250e12, 1125e12, 75e12, 8000e9, 900e9, 50e9),
}

# Prefixes of the `device_kind` of JAX devices; longer prefixes come first.
_CHIP_BY_DEVICE_KIND = {
    **{'TPU v3': 'v3', 'TPU v4': 'v4', 'TPU v5 lite': 'v5e', 'TPU v5': 'v5p', 'TPU v6 lite': 'v6e', 'TPU7x': 'v7x'},
    **{'NVIDIA A100': 'a100', 'NVIDIA H100': 'h100', 'NVIDIA H200': 'h200', 'NVIDIA B200': 'b200'},
}


def find_machine(chip: str) -> Machine:
    """Returns the machine for a chip name such as 'v5e' or 'h100'. Raises UserError for an unknown chip."""
    if chip not in MACHINES:
        raise UserError(f'the chip must be one of {", ".join(MACHINES)}, got {chip!r}')
    return MACHINES[chip]


def find_chip_name(device_kind: str) -> str | None:
    """Returns the chip name of a JAX `device_kind`, such as 'v5p' for 'TPU v5', or None for an unknown chip."""
    return next((chip for kind, chip in _CHIP_BY_DEVICE_KIND.items() if device_kind.startswith(kind)), None)


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
        return sum(kernel.num_runs * max(compute_kernel_times(kernel, self.machine)) for kernel in self.kernels)

    @property
    def compute_seconds(self) -> float:
        """The minimum time of the compute-bound kernels; all other kernels are memory-bound."""
        seconds = ((kernel.num_runs, *compute_kernel_times(kernel, self.machine)) for kernel in self.kernels)
        return sum(num_runs * compute for num_runs, compute, memory in seconds if compute > memory)

    @property
    def bottleneck(self) -> str:
        """The bottleneck: COMPUTE if compute-bound kernels use more than half of the minimum time, otherwise HBM."""
        return COMPUTE if 2 * self.compute_seconds > self.kernel_seconds else HBM

    @property
    def estimated_seconds(self) -> float:
        """The TPU compiler's time estimate, summed over the kernels that have one."""
        cycles = sum(kernel.num_runs * (kernel.cycles or 0) for kernel in self.kernels)
        return cycles / self.machine.clock if self.machine.clock else 0.0

    def unestimated_seconds(self) -> collections.Counter[str]:
        """Returns, for each opcode, the minimum time of the kernels without a time estimate from the TPU compiler."""
        total: collections.Counter[str] = collections.Counter()
        for kernel in self.kernels:
            if kernel.cycles is None:
                total.update({kernel.op: kernel.num_runs * max(compute_kernel_times(kernel, self.machine))})
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
        return self.num_kernel_runs * self.machine.gap


def compute_step_time_bound(program: CompiledProgram, machine: Machine, slices: Sequence[int]) -> StepTimeBound:
    """Computes the minimum time of a program.

    Args:
        slices: index of the slice or node of each device in the program's device assignment.
    """
    kernels_by_location: dict[StepLocation, list[Kernel]] = {}
    for kernel in program.kernels:
        kernels_by_location.setdefault(parse_op_name(kernel.op_name), []).append(kernel)
    operations = [OperationCosts(machine, kernels, location) for location, kernels in kernels_by_location.items()]
    operations.sort(key=lambda operation: -operation.kernel_seconds)
    collectives = _sum_collectives(program.collectives, machine, slices)
    return StepTimeBound(machine, program.kernels, tuple(operations), collectives)


def compute_kernel_times(kernel: Kernel, machine: Machine) -> tuple[float, float]:
    """Returns the compute time and the memory time of one run of a kernel, in seconds."""
    compute = sum(flops / machine.peak_flops_per_second(dtype) for dtype, flops in kernel.flops.items())
    return compute, kernel.bytes / machine.bandwidth


def _sum_collectives(
    collectives: Iterable[Collective], machine: Machine, slices: Sequence[int]
) -> tuple[CollectiveCost, ...]:
    rates = {machine.link_name: machine.link, NETWORK: machine.network}
    costs: dict[tuple[str, str, int], CollectiveCost] = {}
    for collective in collectives:
        kind, members = collective.kind, collective.group_size
        if members == 1:
            continue
        # The slowest link of a group limits the collective.
        crossed = max(len({slices[device] for device in group}) for group in collective.groups)
        link = machine.link_name if crossed == 1 else NETWORK
        cost = costs.setdefault((kind, link, members), CollectiveCost(kind, link, members, rates[link]))
        cost.num_runs += collective.num_runs
        cost.bytes_sent += collective.num_runs * collective.count_bytes_sent(crossed)
    return tuple(sorted(costs.values(), key=lambda cost: -cost.bytes_sent))
