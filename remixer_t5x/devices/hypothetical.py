"""Hardware that is described and not present: its number and kind of devices, and devices to compile a step for.

For TPUs, the TPU compiler compiles a step if `libtpu` is installed, which needs no TPU. Otherwise, and for GPUs, the
step is compiled for virtual CPU devices, over which XLA partitions it in the same way.
"""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from remixer_t5x.errors import UserError

PLATFORMS = ('cpu', 'gpu', 'tpu')
_GIB = 2**30
# Values that libtpu would otherwise look for at length on a machine that is not a TPU host.
_TPU_ENV = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-8',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'TPU_MIN_LOG_LEVEL': '3',
}


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Devices, as described by a file in configs/hardware.

    Attributes:
        platform: 'cpu', 'gpu' or 'tpu'.
        devices: number of devices; None if the file does not set it.
        memory: memory of one device in GiB; None if unknown.
        topology: topology of a TPU slice in libtpu's form ('v3:4x4'); None for other devices.
        compiler: 'tpu' or 'cpu', the XLA compiler of the step; None uses the TPU compiler if possible.
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
        if self.compiler not in (None, 'cpu', 'tpu'):
            raise UserError(f"COMPILER is {self.compiler!r}; type 'cpu' or 'tpu', or None for the better available one")
        if self.compiler == 'tpu' and not (self.topology and has_tpu_compiler()):
            missing = (
                'no TOPOLOGY is given, e.g. --gin.TOPOLOGY=v3:4x4' if has_tpu_compiler() else 'it is not installed'
            )
            raise UserError(f"COMPILER is 'tpu', but {missing}; pip install libtpu, or type --compiler=cpu")

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else int(self.memory * _GIB)

    def count(self) -> int:
        """The number of devices. Raises UserError if it is not set."""
        if self.devices is None:
            raise UserError('the hardware file does not say how many devices there are; type it, such as --devices=32')
        return self.devices

    def compile_devices(self) -> tuple[Sequence[jax.Device], str]:
        """Devices to compile a step for, and the name of the compiler: 'XLA:TPU' or 'XLA:CPU'.

        Raises:
            UserError: the topology does not exist or has another number of devices, or this process has already used
                its CPU devices.
        """
        if self.topology and self.compiler != 'cpu' and has_tpu_compiler():
            return tpu_devices(self.topology, self.count()), 'XLA:TPU'
        return cpu_devices(self.count()), 'XLA:CPU'


def has_tpu_compiler() -> bool:
    """Whether `libtpu` is installed."""
    return importlib.util.find_spec('libtpu') is not None


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
    """The devices of a TPU slice that is not present, for compiling only."""
    for name, value in _TPU_ENV.items():
        os.environ.setdefault(name, value)
    # A v4 chip is one device only if its two cores are configured to work as one, which is the default on a host.
    options = {'chip_config_name': 'megacore'} if topology.startswith('v4:') else {}
    try:
        devices = topologies.get_topology_desc(topology, platform='tpu', **options).devices
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise UserError(f'TOPOLOGY {topology!r} is unknown to libtpu ({reason}); type one such as v5e:4x4') from error
    if len(devices) != count:
        raise UserError(
            f'TOPOLOGY {topology!r} has {len(devices)} devices and DEVICES is {count}; '
            f'type --devices={len(devices)}, or the topology of {count} with --gin.TOPOLOGY'
        )
    return devices


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)
