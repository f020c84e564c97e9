"""Lists published peak rates of accelerators for a roofline model (Williams et al. 2009).

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

import dataclasses
from collections.abc import Mapping

from remixer_t5x.errors import UserError
from remixer_t5x.extras.forecast.hlo_costs import EXACT_FLOAT32


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

    def peak(self, dtype: str) -> float:
        """Returns the FLOP/s of matrix products in a dtype."""
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


def chip_name(device_kind: str) -> str | None:
    """Returns the chip name of a JAX `device_kind`, such as 'v5p' for 'TPU v5', or None for an unknown chip."""
    return next((chip for kind, chip in _CHIP_BY_DEVICE_KIND.items() if device_kind.startswith(kind)), None)
