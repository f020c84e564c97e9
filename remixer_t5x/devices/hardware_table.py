"""Maps a topology such as 'v5e:4x4' or '2*h100:8' to a mesh, the memory of a device, and XLA options.

gin passes the macro TOPOLOGY to these functions (configs/hardware/gpu.gin). TOPOLOGY is None for unknown hardware.
"""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from remixer_t5x.errors import UserError

GPUS = ('a100', 'h100', 'h200', 'b200')
# Chips with two JAX devices each: the two cores of a v3, or the two chiplets of a v7x (Ironwood).
TWO_DEVICE_CHIPS = ('v3', 'v7x')
# Memory of one device in GiB.
MEMORY_GIB = {'v3': 16, 'v4': 32, 'v5e': 16, 'v5p': 95, 'v6e': 32, 'v7x': 96}
MEMORY_GIB |= {'a100': 80, 'h100': 80, 'h200': 140, 'b200': 179}
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


class Topology(NamedTuple):
    """A chip type, such as 'v5e' or 'h100', and the number and arrangement of the chips.

    `slices` is the number of TPU slices or GPU nodes connected by a network. `shape` is the shape of a slice in
    libtpu's notation ('4x4'), or the number of GPUs of a node.
    """

    slices: int
    chip: str
    shape: str

    @property
    def devices(self) -> int:
        """The number of JAX devices: two per chip for TWO_DEVICE_CHIPS, otherwise one per chip."""
        return self.slices * math.prod(map(int, self.shape.split('x'))) * (2 if self.chip in TWO_DEVICE_CHIPS else 1)

    @property
    def is_gpu(self) -> bool:
        return self.chip in GPUS

    @staticmethod
    def parse(text: str) -> 'Topology':
        """Parses a string such as 'v5e:4x4' or '2*h100:8'. Raises UserError for other formats and for unknown GPUs."""
        match = re.fullmatch(r'(?:(\d+)\*)?(\w+):(\d+(?:x\d+)*)', text)
        chip = match[2].lower() if match else ''
        if not match or not (chip in GPUS or chip.startswith('v')):
            raise UserError(
                f'TOPOLOGY must be a chip ({", ".join(GPUS)}, or a TPU such as v5e) and a shape, got {text!r}; '
                'use one such as v5e:4x4, 2*v5e:4x4, h100:8 or 2*h100:8'
            )
        return Topology(int(match[1] or 1), chip, match[3])


def devices(topology: str | None = None) -> int | None:
    """Returns the number of devices of a topology, or None if it is unknown."""
    return None if topology is None else Topology.parse(topology).devices


def memory(topology: str | None = None) -> int | None:
    """Returns the memory of one device in GiB, or None if it is unknown."""
    return None if topology is None else MEMORY_GIB.get(Topology.parse(topology).chip)


def mesh(topology: str | None = None) -> str:
    """Returns the default mesh in the format of `--mesh`; -1 means all remaining devices."""
    if topology is None:
        return 'fsdp=-1'
    slices = Topology.parse(topology).slices
    if slices > 1:
        return f'data={slices},fsdp=-1'
    if devices(topology) == 1:
        return 'data=1'
    return f'data=-1,fsdp={_FSDP_SIZES[topology]}' if topology in _FSDP_SIZES else 'fsdp=-1'


def xla_options(topology: str | None = None) -> Mapping[str, Mapping[str, Any]] | None:
    """Maps platforms to XLA options for the train step. A single device needs no options for collectives."""
    if devices(topology) == 1:
        return {'gpu': _NO_DOT_MERGER} if Topology.parse(topology or '').is_gpu else None
    return _XLA_OPTIONS
