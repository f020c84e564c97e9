"""Lists the published properties of accelerators, one row for each chip.

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
from typing import Any

from remixer_t5x.errors import UserError

# The key in `Chip.peaks` for float32 matrix products whose precision is higher than the default.
EXACT_FLOAT32 = 'f32 exact'


@dataclasses.dataclass(frozen=True)
class Chip:
    """Properties of one JAX device, which is a chip, or half a chip for TPU v3 and TPU7x.

    Attributes:
        name: display name.
        device_kinds: prefixes of JAX's `device_kind`.
        memory: memory in GiB.
        peaks: FLOP/s of matrix products by dtype; other dtypes use the lowest of these rates.
        bandwidth: bytes per second between HBM and the core.
        link: bytes per second that a device can send within its slice or node.
        network: bytes per second that a device can send to other slices or nodes; None if unknown.
        link_name: 'ICI' or 'NVLink'.
        clock: clock rate of a TPU in Hz, to convert the compiler's estimates from cycles to seconds; None for GPUs.
        devices_per_chip: number of JAX devices per chip; prices are per chip.
        gap: seconds between consecutive kernels; 0 for a TPU, which runs a single program.
        cuda: properties of a GPU as CUDA reports them, for XLA:GPU; None for TPUs.
    """

    name: str
    device_kinds: tuple[str, ...]
    memory: float
    peaks: Mapping[str, float]
    bandwidth: float
    link: float
    network: float | None
    link_name: str = 'ICI'
    clock: float | None = None
    devices_per_chip: int = 1
    gap: float = 0.0
    cuda: Mapping[str, Any] | None = None

    def peak_flops_per_second(self, dtype: str) -> float:
        return self.peaks.get(dtype, min(self.peaks.values()))


def _make_tpu(name, device_kinds, memory, peak, bandwidth, link, network, clock, devices_per_chip=1) -> Chip:
    # By default, a TPU rounds float32 operands to bfloat16; the highest precision needs six bfloat16 products.
    peaks = {'bf16': peak, 'f16': peak, 'f32': peak, 's8': peak, EXACT_FLOAT32: peak / 6}
    return Chip(name, device_kinds, memory, peaks, bandwidth, link, network, 'ICI', clock, devices_per_chip)


def _make_gpu(name, device_kind, memory, bfloat16, tf32, float32, bandwidth, link, network, **cuda) -> Chip:
    # By default, JAX multiplies float32 matrices in TF32 on these GPUs.
    peaks = {'bf16': bfloat16, 'f16': bfloat16, 'f32': tf32, EXACT_FLOAT32: float32}
    cuda = {'hbm_bandwidth': int(bandwidth), **cuda}
    return Chip(name, (device_kind,), memory, peaks, bandwidth, link, network, 'NVLink', gap=1e-6, cuda=cuda)


_H100 = dict(capability=(9, 0), cores=132, shared_memory=233_472, l2_cache=52_428_800, clock=1.98, fpus=128)
# Maps the name of a chip in TOPOLOGY to its properties. In `cuda`, memory sizes are in bytes, `hbm_bandwidth` in bytes
# per second, and `clock` in GHz; `fpus` is the number of float32 units per core.
CHIPS = {
    # Each device is half of a chip with 123 TFLOP/s, 900 GB/s to HBM and 332 GB/s to other chips.
    'v3': _make_tpu('TPU v3 core', ('TPU v3',), 16, 61.5e12, 450e9, 166e9, None, 0.94e9, 2),
    'v4': _make_tpu('TPU v4', ('TPU v4',), 32, 275e12, 1200e9, 268e9, None, 1.05e9),
    'v5e': _make_tpu('TPU v5e', ('TPU v5 lite', 'TPU v5e'), 16, 197e12, 819e9, 200e9, 3.1e9, 1.5e9),
    'v5p': _make_tpu('TPU v5p', ('TPU v5',), 95, 459e12, 2765e9, 600e9, 6.25e9, 1.75e9),
    'v6e': _make_tpu('TPU v6e', ('TPU v6 lite', 'TPU v6e'), 32, 918e12, 1638e9, 400e9, None, 1.75e9),
    # Each device is half of a chip with 2307 TFLOP/s, 7380 GB/s to HBM, 600 GB/s to other chips (in one direction)
    # and 12.5 GB/s to the network.
    'v7x': _make_tpu('TPU7x (Ironwood) chiplet', ('TPU7x',), 96, 1153.5e12, 3690e9, 300e9, 6.25e9, 2.2e9, 2),
    'a100': _make_gpu(
        'A100 80 GB SXM', 'NVIDIA A100', 80, 312e12, 156e12, 19.5e12, 2039e9, 300e9, 25e9,
        description='NVIDIA A100-SXM4-80GB', capability=(8, 0), cores=108, device_memory=85_097_971_712,
        shared_memory=167_936, l2_cache=41_943_040, clock=1.41, fpus=64,
    ),
    'h100': _make_gpu(
        'H100 80 GB SXM', 'NVIDIA H100', 80, 989e12, 494e12, 67e12, 3350e9, 450e9, 50e9, **_H100,
        description='NVIDIA H100 80GB HBM3', device_memory=84_978_434_048, hbm_bandwidth=3_352_320_000_000,
    ),
    'h200': _make_gpu(
        'H200 141 GB SXM', 'NVIDIA H200', 140, 989e12, 494e12, 67e12, 4800e9, 450e9, 50e9, **_H100,
        description='NVIDIA H200', device_memory=150_754_820_096,
    ),
    # The memory size is from nvidia-smi; `cuda` is from NVIDIA's data sheet and compute capability 10.0.
    'b200': _make_gpu(
        'B200 180 GB SXM', 'NVIDIA B200', 179, 2250e12, 1125e12, 75e12, 8000e9, 900e9, 50e9,
        description='NVIDIA B200', capability=(10, 0), cores=148, device_memory=192_265_846_784,
        shared_memory=233_472, l2_cache=132_644_864, clock=1.965, fpus=128,
    ),
}  # fmt: skip
# Peak bfloat16 FLOP/s of devices that TOPOLOGY does not support.
_OTHER_PEAKS = {'TPU v2': 22.5e12, 'NVIDIA H100 PCIe': 756e12, 'NVIDIA H100 NVL': 835e12, 'NVIDIA GH200': 989e12}
_BY_DEVICE_KIND: Mapping[str, Chip | float] = {
    **{kind: chip for chip in CHIPS.values() for kind in chip.device_kinds},
    **_OTHER_PEAKS,
}


def get_chip(name: str) -> Chip:
    """Returns the chip with a name such as 'v5e' or 'h100'. Raises UserError for an unknown name."""
    if name not in CHIPS:
        raise UserError(f'the chip must be one of {", ".join(CHIPS)}, got {name!r}')
    return CHIPS[name]


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of a JAX `device_kind`, such as v5p for 'TPU v5', or None for an unknown chip."""
    properties = _find_chip_or_peak(device_kind)
    return properties if isinstance(properties, Chip) else None


def get_peak_flops(device_kind: str) -> float | None:
    """Returns the peak bfloat16 throughput of one device in FLOP/s, or None if it is unknown."""
    properties = _find_chip_or_peak(device_kind)
    return properties.peaks['bf16'] if isinstance(properties, Chip) else properties


def _find_chip_or_peak(device_kind: str) -> Chip | float | None:
    """Returns the entry of the longest matching prefix."""
    prefixes = [kind for kind in _BY_DEVICE_KIND if device_kind.lower().startswith(kind.lower())]
    return _BY_DEVICE_KIND[max(prefixes, key=len)] if prefixes else None
