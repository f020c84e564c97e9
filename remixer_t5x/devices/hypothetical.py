"""Hardware that is described and not present: its number and kind of devices, and devices to compile a step for.

The TPU compiler compiles a step if `libtpu` is installed, and the GPU compiler if JAX's CUDA plugin is; neither needs
the device. Otherwise the step is compiled for virtual CPU devices, over which XLA partitions it in the same way.
"""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from remixer_t5x.devices import gpu_targets
from remixer_t5x.devices.hardware_table import Topology
from remixer_t5x.errors import UserError

PLATFORMS = ('cpu', 'gpu', 'tpu')
COMPILERS = ('cpu', 'gpu', 'tpu')
# What to install for a compiler that is missing.
_INSTALL = {
    'tpu': "pip install 'remixer-t5x[forecast]', which has libtpu",
    'gpu': "pip install 'remixer-t5x[forecast-gpu]', which has JAX's CUDA plugin",
}
# The share of a GPU's memory that JAX takes at its start (docs.jax.dev/en/latest/gpu_memory_allocation.html).
GPU_SHARE, DEFAULT_GPU_SHARE = 'XLA_PYTHON_CLIENT_MEM_FRACTION', 0.75
_GIB = 2**30
# Values that libtpu would otherwise look for at length on a machine that is not a TPU host.
_TPU_ENV = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_MIN_LOG_LEVEL': '3',
    # Several processes may compile at once, as none of them uses a TPU.
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


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
            raise UserError(f'PLATFORM is {self.platform!r}; type one of {", ".join(PLATFORMS)}')
        if self.devices is not None and (not _is_whole(self.devices) or self.devices < 1):
            raise UserError(f'DEVICES is {self.devices!r}; type a whole number from 1, such as --devices=8')
        if self.memory is not None and not (isinstance(self.memory, int | float) and self.memory > 0):
            raise UserError(f'DEVICE_MEMORY is {self.memory!r}; type the GiB of one device, such as --device_memory=16')
        if self.compiler not in (None, *COMPILERS):
            raise UserError(
                f"COMPILER is {self.compiler!r}; type 'cpu', 'gpu' or 'tpu', or None for the best available one"
            )
        if self.compiler in _INSTALL:
            self._check_compiler(self.compiler)

    def _check_compiler(self, compiler: str) -> None:
        if not has_compiler(compiler):
            raise UserError(
                f'the {compiler.upper()} compiler is not installed; {_INSTALL[compiler]}, or type --compiler=cpu'
            )
        if self.own_compiler() != compiler:
            example = {'tpu': 'v3:4x4', 'gpu': 'h100:8'}[compiler]
            raise UserError(
                f'COMPILER is {compiler!r} and TOPOLOGY is {self.topology!r}; type --gin.TOPOLOGY={example}'
            )

    @property
    def memory_bytes(self) -> int | None:
        """What a run can use of one device's memory."""
        return None if self.memory is None else int(self.memory * self.memory_share * _GIB)

    @property
    def memory_share(self) -> float:
        """The share of a device's memory that JAX takes: all of a TPU's, and of a GPU's as its environment says.

        Raises UserError if XLA_PYTHON_CLIENT_MEM_FRACTION is not a number from 0 to 1.
        """
        if self.platform != 'gpu' or os.environ.get('XLA_PYTHON_CLIENT_ALLOCATOR') == 'platform':
            return 1.0
        text = os.environ.get(GPU_SHARE, '')
        try:
            share = float(text) if text else DEFAULT_GPU_SHARE
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UserError(f"{GPU_SHARE} is {text!r}; give a share of a GPU's memory, such as 0.95")
        return share

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
        own = self.own_compiler()
        if self.topology and own != 'cpu' and self.compiler != 'cpu' and has_compiler(own):
            make = tpu_devices if own == 'tpu' else gpu_devices
            return make(self.topology, self.count()), f'XLA:{own.upper()}'
        return cpu_devices(self.count()), 'XLA:CPU'

    def require_own_compiler(self) -> None:
        """Raises UserError unless the compiler of the described chip is installed."""
        if not self.topology:
            raise UserError('no TOPOLOGY is given, so the chip is unknown; type one such as --gin.TOPOLOGY=v5e:2x4')
        self._check_compiler(self.own_compiler())


def has_compiler(name: str) -> bool:
    """Whether the compiler 'tpu', 'gpu' or 'cpu' is installed."""
    if name == 'tpu':
        found = importlib.util.find_spec('libtpu')
        # A folder of that name in the current folder is not the package.
        return found is not None and found.origin is not None
    return name == 'cpu' or any(_has_plugin(version) for version in (12, 13))


def _has_plugin(cuda: int) -> bool:
    if importlib.util.find_spec('jax_plugins') is None:
        return False
    return importlib.util.find_spec(f'jax_plugins.xla_cuda{cuda}') is not None


def cpu_devices(count: int) -> Sequence[jax.Device]:
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


def tpu_devices(topology: str, count: int) -> Sequence[jax.Device]:
    """The devices of TPU slices that are not present, for compiling only."""
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
        devices = topologies.get_topology_desc(f'{chip}:{shape}', platform='tpu', **options).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'TOPOLOGY {topology!r} is unknown to libtpu ({reason}); type one such as v5e:4x4') from error
    return _counted(devices, topology, count)


def gpu_devices(topology: str, count: int) -> Sequence[jax.Device]:
    """GPUs that are not present, for compiling only."""
    nodes, chip, shape = Topology.parse(topology)
    if not shape.isdecimal():
        raise UserError(f'TOPOLOGY {topology!r} is not a number of GPUs; type {chip}:8, or 2*{chip}:8 for two nodes')
    proto = gpu_targets.TARGETS[chip].proto()
    described = topologies.get_topology_desc('', platform='cuda', target_config=proto, topology=f'{nodes}x1x{shape}')
    return _counted(described.devices, topology, count)


def _counted(devices: Sequence[jax.Device], topology: str, count: int) -> Sequence[jax.Device]:
    if len(devices) != count:
        raise UserError(
            f'TOPOLOGY {topology!r} has {len(devices)} devices and DEVICES is {count}; '
            f'type --devices={len(devices)}, or the topology of {count} with --gin.TOPOLOGY'
        )
    return devices


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
