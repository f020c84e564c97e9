"""Descriptions of hardware that is not present: its number and kind of devices, and devices to compile a step for.

The TPU compiler compiles a step if `libtpu` is installed, and the GPU compiler if JAX's CUDA plugin is; neither needs
the device. Otherwise the step is compiled for virtual CPU devices, over which XLA partitions it in the same way.
"""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.experimental import topologies

from remixer_t5x.devices.hardware_table import Topology
from remixer_t5x.errors import UserError

PLATFORMS = ('cpu', 'gpu', 'tpu')
# How to install a compiler, and a topology that it compiles for.
_INSTALL = {
    'tpu': "pip install 'remixer-t5x[forecast]', which has libtpu",
    'gpu': "pip install 'remixer-t5x[forecast-gpu]', which has JAX's CUDA plugin",
}
_EXAMPLES = {'tpu': 'v3:4x4', 'gpu': 'h100:8'}
# The share of a GPU's memory that JAX takes at its start (docs.jax.dev/en/latest/gpu_memory_allocation.html).
GPU_SHARE, DEFAULT_GPU_SHARE = 'XLA_PYTHON_CLIENT_MEM_FRACTION', '0.75'
# Values that libtpu would otherwise look for at length on a machine that is not a TPU host.
_TPU_ENV = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_MIN_LOG_LEVEL': '3',
    # Several processes may compile at once, because none of them uses a TPU.
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
# cuDNN 9.8, as JAX writes its version.
CUDNN_VERSION = 90800


class Gpu(NamedTuple):
    """The numbers that CUDA reports for a GPU in SXM form, and in which the described GPUs differ.

    XLA's cost model reads them; the code that XLA generates depends on the compute capability.

    Attributes:
        capability: major version of the CUDA compute capability; the minor version is 0.
        cores: streaming multiprocessors.
        memory, bandwidth: bytes, and bytes per second.
        shared_memory: bytes of a core.
        l2_cache: bytes.
        clock: GHz.
        fpus: float32 units of a core.
    """

    name: str
    capability: int
    cores: int
    memory: int
    bandwidth: int
    shared_memory: int
    l2_cache: int
    clock: float
    fpus: int

    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto` in text form."""
        # A block cannot use the KiB of a core's shared memory that CUDA reserves for itself.
        return _TARGET_CONFIG.format(**self._asdict(), block_memory=self.shared_memory - 1024)


_H100 = Gpu('NVIDIA H100 80GB HBM3', 9, 132, 84_978_434_048, 3_352_320_000_000, 233_472, 52_428_800, 1.98, 128)
GPUS = {
    'a100': Gpu('NVIDIA A100-SXM4-80GB', 8, 108, 85_097_971_712, 2_039_000_000_000, 167_936, 41_943_040, 1.41, 64),
    'h100': _H100,
    'h200': _H100._replace(name='NVIDIA H200', memory=150_754_820_096, bandwidth=4_800_000_000_000),
}
_TARGET_CONFIG = """
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} minor: 0 }}
  core_count: {cores}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_cache}
  shared_memory_per_core: {shared_memory}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {block_memory}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  fpus_per_core: {fpus}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices, as described by a file in configs/hardware and a topology.

    Attributes:
        platform: 'cpu', 'gpu' or 'tpu'.
        devices: number of devices; None if the file does not set it.
        memory: memory of one device in GiB; None if unknown.
        topology: chips and their connections, as `Topology.parse` reads them ('v3:4x4', 'h100:8'); None if unknown.
        compiler: 'tpu', 'gpu' or 'cpu', the XLA compiler of the step; None uses the device's own if possible.
    """

    platform: str = 'cpu'
    devices: int | None = None
    memory: float | None = None
    topology: str | None = None
    compiler: str | None = None

    def __post_init__(self):
        if self.platform not in PLATFORMS:
            raise UserError(f'PLATFORM must be one of {", ".join(PLATFORMS)}, got {self.platform!r}')
        if self.devices is not None and not (type(self.devices) is int and self.devices > 0):
            raise UserError(f'DEVICES must be a positive integer, got {self.devices!r}; type --devices=8')
        if self.memory is not None and not (isinstance(self.memory, int | float) and self.memory > 0):
            raise UserError(f'DEVICE_MEMORY must be in GiB, got {self.memory!r}; type --device_memory=16')
        if self.compiler in _INSTALL:
            self._check_compiler(self.compiler)

    def _check_compiler(self, compiler: str) -> None:
        if not has_compiler(compiler):
            raise UserError(
                f'the {compiler.upper()} compiler is not installed; {_INSTALL[compiler]}, or type --compiler=cpu'
            )
        if self.own_compiler() != compiler:
            raise UserError(
                f'TOPOLOGY must be of {compiler.upper()}s for --compiler={compiler}, got {self.topology!r}; '
                f'type --gin.TOPOLOGY={_EXAMPLES[compiler]}'
            )

    @property
    def memory_bytes(self) -> int | None:
        """The part of one device's memory that a run can use."""
        return None if self.memory is None else int(self.memory * self.memory_share * 2**30)

    @property
    def memory_share(self) -> float:
        """The share of a device's memory that JAX takes: all of a TPU's, and of a GPU's as its environment says.

        Raises UserError if XLA_PYTHON_CLIENT_MEM_FRACTION is not a number.
        """
        if self.platform != 'gpu' or os.environ.get('XLA_PYTHON_CLIENT_ALLOCATOR') == 'platform':
            return 1.0
        text = os.environ.get(GPU_SHARE) or DEFAULT_GPU_SHARE
        try:
            return float(text)
        except ValueError:
            raise UserError(f"{GPU_SHARE} must be a share of a GPU's memory, got {text!r}; set 0.95") from None

    def count(self) -> int:
        """The number of devices. Raises UserError if it is not set."""
        if self.devices is None:
            raise UserError('the hardware file does not say how many devices there are; type it, such as --devices=32')
        return self.devices

    def own_compiler(self) -> str:
        """The compiler of the described chip, 'tpu' or 'gpu'; 'cpu' if the chip is unknown."""
        if not self.topology:
            return 'cpu'
        return 'gpu' if Topology.parse(self.topology).is_gpu else 'tpu'

    def compile_devices(self) -> tuple[Sequence[jax.Device], str]:
        """Devices to compile a step for, and the name of the compiler: 'XLA:TPU', 'XLA:GPU' or 'XLA:CPU'.

        Raises:
            UserError: the topology does not exist or has another number of devices, or this process has already used
                its CPU devices.
        """
        own, count = self.own_compiler(), self.count()
        if not self.topology or self.compiler == 'cpu' or not has_compiler(own):
            return _cpu_devices(count), 'XLA:CPU'
        devices = _tpu_devices(self.topology) if own == 'tpu' else _gpu_devices(self.topology)
        if len(devices) != count:
            raise UserError(
                f'TOPOLOGY {self.topology!r} has {len(devices)} devices and DEVICES is {count}; '
                f'type --devices={len(devices)}, or the topology of {count} with --gin.TOPOLOGY'
            )
        return devices, f'XLA:{own.upper()}'

    def require_own_compiler(self) -> None:
        """Raises UserError unless the compiler of the described chip is installed."""
        if not self.topology:
            raise UserError('the chip is unknown without a TOPOLOGY; type one such as --gin.TOPOLOGY=v5e:2x4')
        self._check_compiler(self.own_compiler())


def has_compiler(name: str) -> bool:
    """Whether the compiler 'tpu', 'gpu' or 'cpu' is installed."""
    if name == 'tpu':
        spec = importlib.util.find_spec('libtpu')
        # A folder of that name in the current folder is not the package.
        return spec is not None and spec.origin is not None
    if name == 'gpu':
        plugins = importlib.util.find_spec('jax_plugins')
        return plugins is not None and any(
            importlib.util.find_spec(f'jax_plugins.xla_cuda{version}') for version in (12, 13)
        )
    return True


def _cpu_devices(count: int) -> Sequence[jax.Device]:
    """Creates `count` virtual CPU devices. Works once, before the process first asks JAX for a device."""
    with contextlib.suppress(RuntimeError):
        jax.config.update('jax_num_cpu_devices', count)
    devices = jax.devices('cpu')
    if len(devices) < count:
        raise UserError(
            f'{count} virtual CPU devices are needed and this process has {len(devices)}; '
            'run the command in a new process, without XLA_FLAGS=--xla_force_host_platform_device_count'
        )
    return devices[:count]


def _tpu_devices(topology: str) -> Sequence[jax.Device]:
    for name, value in _TPU_ENV.items():
        os.environ.setdefault(name, value)
    slices, chip, shape = Topology.parse(topology)
    options: dict[str, object] = {'num_slices': slices} if slices > 1 else {}
    if chip == 'v4':
        # A v4 chip is one device only if its two cores are configured to work as one, which is the default on a host.
        options['chip_config_name'] = 'megacore'
    if set(shape.split('x')) == {'1'}:
        # Hosts have several chips unless this says otherwise.
        options['chips_per_host_bounds'] = (1, 1, 1)
    try:
        return topologies.get_topology_desc(f'{chip}:{shape}', platform='tpu', **options).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'TOPOLOGY {topology!r} is unknown to libtpu ({reason}); type one such as v5e:4x4') from error


def _gpu_devices(topology: str) -> Sequence[jax.Device]:
    nodes, chip, shape = Topology.parse(topology)
    if not shape.isdecimal():
        raise UserError(f'TOPOLOGY must have a number of GPUs, got {topology!r}; type {chip}:8, or 2*{chip}:8')
    config, layout = GPUS[chip].target_config(), f'{nodes}x1x{shape}'
    return topologies.get_topology_desc('', platform='cuda', target_config=config, topology=layout).devices
