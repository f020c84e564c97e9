"""What a topology such as 'v5e:4x4' or '2*h100:8' says about the mesh, the memory of a device, and XLA's options.

gin calls these functions with TOPOLOGY (configs/hardware/gpu.gin); None is hardware that is not described.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from remixer_t5x.errors import UserError

GPUS = ('a100', 'h100', 'h200')
# GiB of a device.
MEMORY = {'v3': 16, 'v4': 32, 'v5e': 16, 'v5p': 95, 'v6e': 32, 'a100': 80, 'h100': 80, 'h200': 140}
# Devices that share one copy of the parameters, if these are fewer than a slice or node has. All others split
# parameters and moments over a whole slice or node, although a small model fits unsplit: each device then updates its
# own part alone, which saves more than the gathers cost. By `info --speed`, T5.1.1 base takes 5% to 12% less than
# with data=-1 if collectives run behind kernels, on H100, v4, v5e, v5p and v6e; if none does, 1% to 6% less, and on
# v5e 4% more (docs/many_devices.md). Over a network between slices or nodes only gradients travel (data).
_FSDP = {'v3:2x2': 2, 'v3:2x4': 2, 'v3:4x4': 2, 'v4:2x2x4': 4, 'v5e:4x4': 8}
# Options of XLA for the train step, by platform: collectives run behind other kernels. --verbose shows those in use.
# Sources: docs.jax.dev/en/latest/gpu_performance_tips.html for GPUs, benchmarks/xla_flags_library.py of
# github.com/AI-Hypercomputer/maxtext (CF_FOR_ALL_GATHER) for TPUs. jaxlib 0.10.2 and libtpu 0.0.42.1 know all of them,
# and compile the same program without them: they are on by default, and stay on here.
#   xla_gpu_dot_merger_threshold_mb is the size up to which XLA makes one matmul of several with the same input. For
# their gradients it then copies what it would have to join. By `info --speed` a step of size base on an H100 takes 0.9%
# to 1.5% less without.
_NO_MERGING = {'xla_gpu_dot_merger_threshold_mb': 0}
_XLA_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    'gpu': {'xla_gpu_enable_latency_hiding_scheduler': True, **_NO_MERGING},
    'tpu': {
        'xla_tpu_enable_latency_hiding_scheduler': True,
        'xla_tpu_enable_async_collective_fusion': True,
        'xla_tpu_enable_async_collective_fusion_fuse_all_gather': True,
        'xla_tpu_enable_async_collective_fusion_multiple_steps': True,
        'xla_tpu_overlap_compute_collective_tc': True,
        'xla_enable_async_all_gather': True,
    },
}


class Topology(NamedTuple):
    """How devices are connected.

    Attributes:
        slices: TPU slices, or nodes of GPUs, which a network connects.
        chip: 'v5e', 'h100', ...
        shape: a slice in libtpu's form ('4x4'); the number of GPUs of a node.
    """

    slices: int
    chip: str
    shape: str

    @property
    def devices(self) -> int:
        """The number of devices as JAX counts them: a core of a v3, a chip of any other."""
        return self.slices * math.prod(map(int, self.shape.split('x'))) * (2 if self.chip == 'v3' else 1)

    @property
    def is_gpu(self) -> bool:
        return self.chip in GPUS

    @staticmethod
    def parse(text: str) -> 'Topology':
        """The topology of a text such as 'v5e:4x4', '2*v5e:4x4', 'h100:8' or '2*h100:8'.

        Raises:
            UserError: the text has another form, or names a GPU that is not known.
        """
        match = re.fullmatch(r'(?:(\d+)\*)?(\w+):(\d+(?:x\d+)*)', text)
        chip = match[2].lower() if match else ''
        if not match or not (chip in GPUS or chip.startswith('v')):
            raise UserError(
                f'TOPOLOGY must be chips ({", ".join(GPUS)}, or a TPU such as v5e) and their arrangement, '
                f'got {text!r}; type one such as v5e:4x4, 2*v5e:4x4, h100:8 or 2*h100:8'
            )
        return Topology(int(match[1] or 1), chip, match[3])


def devices(topology: str | None = None) -> int | None:
    """The number of devices; None if it is not known."""
    return None if topology is None else Topology.parse(topology).devices


def memory(topology: str | None = None) -> int | None:
    """GiB of one device; None if they are not known."""
    return None if topology is None else MEMORY.get(Topology.parse(topology).chip)


def mesh(topology: str | None = None) -> str:
    """The sizes of the mesh axes, as `--mesh` takes them; -1 takes all devices that the others leave."""
    found = None if topology is None else Topology.parse(topology)
    if found is None or (found.slices == 1 and found.devices > 1):
        fsdp = _FSDP.get(topology or '')
        return f'data=-1,fsdp={fsdp}' if fsdp else 'fsdp=-1'
    return f'data={found.slices},fsdp=-1' if found.slices > 1 else 'data=1'


def xla_options(topology: str | None = None) -> Mapping[str, Mapping[str, Any]] | None:
    """Options of XLA for the train step, by platform; one device has no collectives."""
    if topology is not None and (found := Topology.parse(topology)).devices == 1:
        return {'gpu': _NO_MERGING} if found.is_gpu else None
    return _XLA_OPTIONS
