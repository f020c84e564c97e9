"""Maps a topology such as 'v5e:4x4' or '2*h100:8' to a mesh, the memory of a device, and XLA options.

gin passes the macro TOPOLOGY to these functions (configs/hardware/gpu.gin). TOPOLOGY is None for unknown hardware.

`Hardware` describes hardware, so that programs can be compiled for devices that are absent. The TPU compiler requires
`libtpu`, and the GPU compiler requires JAX's CUDA plugin. If these packages are missing, programs are compiled for
virtual CPU devices, over which XLA partitions programs in the same way.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from remixer_t5x import ranges
from remixer_t5x.devices.chips import CHIPS
from remixer_t5x.errors import UserError, root_cause_message

# Maps each topology that shards parameters over only a fraction of a slice to the size of its mesh axis `fsdp`. By
# default, parameters and moments are sharded over an entire slice or node, so that each device updates only its shard.
# docs/forecast.md reports the measurements.
_FSDP_SIZES = {'v3:2x2': 2, 'v3:2x4': 2, 'v3:4x4': 2, 'v4:2x2x4': 4, 'v5e:4x4': 8}
# XLA options for compiling the train step on each platform; most of them overlap collectives with computation. Sources:
# docs.jax.dev/en/latest/gpu_performance_tips.html for GPUs, benchmarks/xla_flags_library.py of
# github.com/AI-Hypercomputer/maxtext (CF_FOR_ALL_GATHER) for TPUs. Most options are XLA's current defaults.
# The dot merger is disabled, because it would copy the operands of the gradient matmuls to concatenate them.
_NO_DOT_MERGER = {'xla_gpu_dot_merger_threshold_mb': 0}
_XLA_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    'gpu': {'xla_gpu_enable_latency_hiding_scheduler': True, **_NO_DOT_MERGER},
    'tpu': {
        'xla_tpu_enable_latency_hiding_scheduler': True,
        'xla_tpu_enable_async_collective_fusion': True,
        'xla_tpu_enable_async_collective_fusion_fuse_all_gather': True,
        'xla_tpu_enable_async_collective_fusion_multiple_steps': True,
        'xla_tpu_overlap_compute_collective_tc': True,
        'xla_enable_async_all_gather': True,
    },
}
PLATFORMS = ('cpu', 'gpu', 'tpu')
# Installation command of each compiler.
_INSTALL_COMMANDS = {
    'tpu': "pip install 'remixer-t5x[forecast]', which includes libtpu",
    'gpu': "pip install 'remixer-t5x[forecast-gpu]', which includes JAX's CUDA plugin",
}
# Environment variable for the fraction of GPU memory that JAX preallocates, and the default fraction
# (docs.jax.dev/en/latest/gpu_memory_allocation.html).
GPU_SHARE, DEFAULT_GPU_SHARE = 'XLA_PYTHON_CLIENT_MEM_FRACTION', '0.75'
# Without these environment variables, libtpu would query the metadata server of a TPU host, with long timeouts.
_TPU_ENV = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_MIN_LOG_LEVEL': '3',
    # Allow several processes to load libtpu at the same time, because none of them uses a TPU.
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
# cuDNN 9.8, in JAX's version format.
CUDNN_VERSION = 90800
# XLA's `GpuTargetConfigProto` in text format.
_TARGET_CONFIG = """
gpu_device_info {{
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  core_count: {cores}
  clock_rate_ghz: {clock}
  device_memory_size: {device_memory}
  memory_bandwidth: {hbm_bandwidth}
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
device_description_str: "{description}"
"""


class Topology(NamedTuple):
    """A chip type, such as 'v5e' or 'h100', and the number and arrangement of the chips.

    `slices` is the number of TPU slices or GPU nodes connected by a network. `shape` is the shape of a slice in
    libtpu's notation ('4x4'), or the number of GPUs of a node.
    """

    slices: int
    chip: str
    shape: str

    @property
    def num_devices(self) -> int:
        """The number of JAX devices."""
        return self.slices * math.prod(map(int, self.shape.split('x'))) * CHIPS[self.chip].devices_per_chip

    @property
    def platform(self) -> str:
        return 'tpu' if CHIPS[self.chip].cuda is None else 'gpu'

    @staticmethod
    def from_string(text: str) -> 'Topology':
        """Parses a string such as 'v5e:4x4' or '2*h100:8'. Raises UserError for other formats and unknown chips."""
        match = re.fullmatch(r'(?:(\d+)\*)?(\w+):(\d+(?:x\d+)*)', text)
        if not match or match[2].lower() not in CHIPS:
            raise UserError(
                f'TOPOLOGY must be a chip ({", ".join(CHIPS)}) and a shape, got {text!r}; '
                'use one such as v5e:4x4, 2*v5e:4x4, h100:8 or 2*h100:8'
            )
        return Topology(int(match[1] or 1), match[2].lower(), match[3])


def devices(topology: str | None = None) -> int | None:
    """Returns the number of devices of a topology, or None if it is unknown."""
    return None if topology is None else Topology.from_string(topology).num_devices


def memory(topology: str | None = None) -> float | None:
    """Returns the memory of one device in GiB, or None if it is unknown."""
    return None if topology is None else CHIPS[Topology.from_string(topology).chip].memory


def mesh(topology: str | None = None) -> str:
    """Returns the default mesh in the format of `--mesh`; -1 means all remaining devices."""
    if topology is None:
        return 'fsdp=-1'
    slices = Topology.from_string(topology).slices
    if slices > 1:
        return f'data={slices},fsdp=-1'
    if devices(topology) == 1:
        return 'data=1'
    return f'data=-1,fsdp={_FSDP_SIZES[topology]}' if topology in _FSDP_SIZES else 'fsdp=-1'


def xla_options(topology: str | None = None) -> Mapping[str, Mapping[str, Any]] | None:
    """Maps platforms to XLA options for the train step. A single device needs no options for collectives."""
    if devices(topology) == 1:
        return {'gpu': _NO_DOT_MERGER} if Topology.from_string(topology or '').platform == 'gpu' else None
    return _XLA_OPTIONS


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices to run on or compile for, which need not be attached to this machine.

    A file in configs/hardware and a topology configure the fields.

    Attributes:
        platform: 'cpu', 'gpu' or 'tpu'.
        devices: number of devices; None if not configured.
        memory: memory of one device in GiB; None if unknown.
        topology: a string that `Topology.from_string` can parse, such as 'v3:4x4' or 'h100:8'; None if unknown.
        compiler: 'cpu' selects XLA:CPU; None selects the compiler of the chip if it is installed.
    """

    platform: str = 'cpu'
    devices: ranges.Count | None = None
    memory: ranges.Positive | None = None
    topology: str | None = None
    compiler: str | None = None

    def __post_init__(self):
        if self.platform not in PLATFORMS:
            raise UserError(f'PLATFORM must be one of {", ".join(PLATFORMS)}, got {self.platform!r}')
        ranges.check_fields(self, memory='DEVICE_MEMORY')
        if self.topology and self.platform != (platform := Topology.from_string(self.topology).platform):
            raise UserError(
                f'PLATFORM must be {platform!r} for TOPOLOGY {self.topology!r}, got {self.platform!r}; '
                f'pass --gin_file=hardware/{platform}.gin'
            )

    @property
    def memory_bytes(self) -> int | None:
        """The device memory in bytes that JAX can use; None if unknown."""
        return None if self.memory is None else int(self.memory * self.memory_share * 2**30)

    @property
    def memory_share(self) -> float:
        """The fraction of device memory that JAX can use: 1 for a TPU; for a GPU, set by environment variables."""
        if self.platform != 'gpu' or os.environ.get('XLA_PYTHON_CLIENT_ALLOCATOR') == 'platform':
            return 1.0
        text = os.environ.get(GPU_SHARE) or DEFAULT_GPU_SHARE
        with contextlib.suppress(ValueError):
            if math.isfinite(share := float(text)) and share > 0:
                return share
        raise UserError(f'{GPU_SHARE} must be a number above 0, got {text!r}; set {GPU_SHARE}={DEFAULT_GPU_SHARE}')

    def require_num_devices(self) -> int:
        """Returns the number of devices. Raises UserError if DEVICES is not set."""
        if self.devices is None:
            raise UserError('DEVICES must be set to the number of devices, got None; pass --devices=32')
        return self.devices

    @property
    def compiler_name(self) -> str:
        """The compiler for the target devices: 'XLA:TPU', 'XLA:GPU' or 'XLA:CPU'.

        'XLA:CPU' is used without a topology, if `compiler` is 'cpu', or if the chip's compiler is not installed.
        """
        is_cpu = not self.topology or self.compiler == 'cpu' or not has_compiler(self.platform)
        return f'XLA:{"CPU" if is_cpu else self.platform.upper()}'

    def get_target_devices(self) -> Sequence[jax.Device]:
        """Returns the described devices, or virtual CPU devices if the compiler is XLA:CPU.

        Raises UserError if the topology does not exist or has another number of devices, or if this process has already
        initialized its CPU devices.
        """
        count = self.require_num_devices()
        if not self.topology or self.compiler_name == 'XLA:CPU':
            return _create_cpu_devices(count)
        describe = _describe_tpu_devices if self.platform == 'tpu' else _describe_gpu_devices
        devices = describe(self.topology)
        if len(devices) != count:
            raise UserError(
                f'DEVICES must be {len(devices)}, the number of devices in TOPOLOGY {self.topology!r}, got {count}; '
                f'pass --devices={len(devices)}, or another --gin.TOPOLOGY'
            )
        return devices

    def require_chip_compiler(self) -> None:
        """Raises UserError unless the compiler for the described chip is installed."""
        if not self.topology:
            raise UserError('TOPOLOGY must be a chip and a shape, got None; pass --gin.TOPOLOGY=v5e:2x4')
        if not has_compiler(self.platform):
            command = _INSTALL_COMMANDS[self.platform]
            raise UserError(f'the {self.platform.upper()} compiler must be installed; run {command}')


def has_compiler(name: str) -> bool:
    """Returns whether the compiler 'tpu' or 'gpu' is installed."""
    modules = {'tpu': ('libtpu',), 'gpu': ('jax_cuda12_plugin', 'jax_cuda13_plugin')}
    return any(importlib.util.find_spec(module) for module in modules[name])


def _create_cpu_devices(count: int) -> Sequence[jax.Device]:
    """Creates `count` virtual CPU devices. Can be called only once, before the process initializes JAX's devices."""
    with contextlib.suppress(RuntimeError):
        jax.config.update('jax_num_cpu_devices', count)
    devices = jax.devices('cpu')
    if len(devices) < count:
        raise UserError(
            f'this process must have at least {count} virtual CPU devices, got {len(devices)}; run the command in a '
            'new process, without XLA_FLAGS=--xla_force_host_platform_device_count'
        )
    return devices[:count]


def _describe_tpu_devices(topology: str) -> Sequence[jax.Device]:
    for name, value in _TPU_ENV.items():
        os.environ.setdefault(name, value)
    slices, chip, shape = Topology.from_string(topology)
    options: dict[str, object] = {'num_slices': slices} if slices > 1 else {}
    if chip == 'v4':
        # As on a TPU host, use megacore mode, in which a v4 chip is a single device.
        options['chip_config_name'] = 'megacore'
    if set(shape.split('x')) == {'1'}:
        # Select a host with a single chip, because libtpu assumes a host with multiple chips by default.
        options['chips_per_host_bounds'] = (1, 1, 1)
    try:
        name = 'tpu7x' if chip == 'v7x' else chip
        return topologies.get_topology_desc(f'{name}:{shape}', platform='tpu', **options).devices
    except Exception as error:
        raise UserError(
            f'TOPOLOGY must be supported by libtpu, got {topology!r} ({root_cause_message(error)}); use one such as '
            'v5e:4x4'
        ) from error


def _describe_gpu_devices(topology: str) -> Sequence[jax.Device]:
    nodes, chip, shape = Topology.from_string(topology)
    if not shape.isdecimal():
        raise UserError(
            f'TOPOLOGY must end with the number of GPUs per node, got {topology!r}; use {chip}:8 or 2*{chip}:8'
        )
    cuda = CHIPS[chip].cuda or {}
    # CUDA reserves 1 KiB of shared memory per thread block.
    config = _TARGET_CONFIG.format(**cuda, block_memory=cuda['shared_memory'] - 1024)
    layout = f'{nodes}x1x{shape}'
    return topologies.get_topology_desc('', platform='cuda', target_config=config, topology=layout).devices
