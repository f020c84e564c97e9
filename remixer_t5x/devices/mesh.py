"""The device mesh `data` x `fsdp` x `tensor`: parses its sizes and assigns devices to it.

A slice is a group of devices with fast links: a TPU slice (ICI), or the GPUs of one node (NVLink). With several slices,
the axes that communicate least cross slices: `data` first, `fsdp` for the rest, `tensor` never. JAX arranges the
devices within a slice (`jax.make_mesh`) and over several (`create_hybrid_device_mesh`).
"""

import collections
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from remixer_t5x.errors import UserError

MESH_AXES = ('data', 'fsdp', 'tensor')
# On these platforms a logical axis may cover parts of two physical axes; jax.make_mesh makes the same exception.
_SPLITTING_KINDS = ('TPU v5 lite', 'TPU v5e')
_EXAMPLE = 'type --mesh=data=-1,fsdp=1,tensor=1'


def parse_sizes(text: str) -> tuple[int, int, int]:
    """(data, fsdp, tensor) of `'data=2,fsdp=4'`; -1 means all remaining devices.

    An axis that is not named is 1, except that `data` takes the remaining devices if no other axis does.

    Raises:
        UserError: `text` is not a list of known axes with whole numbers, each once.
    """
    sizes: dict[str, int] = {}
    parts = [part for part in text.split(',') if part.strip()] if isinstance(text, str) else []
    if not parts:
        raise UserError(f'the mesh must be axes with sizes, got {text!r}; type --mesh=data=2,fsdp=4')
    for part in parts:
        name, _, size = (word.strip() for word in part.partition('='))
        if name not in MESH_AXES:
            near = difflib.get_close_matches(name, MESH_AXES, n=1) or ['data']
            raise UserError(
                f'mesh {text!r}: {name!r} is not a mesh axis ({", ".join(MESH_AXES)}); '
                f'type --mesh={near[0]}={size or "2"}'
            )
        if name in sizes or not size.removeprefix('-').isdecimal():
            raise UserError(
                f'mesh {text!r}: {name} must have one size, a whole number, got {size!r}; type --mesh={name}=2'
            )
        sizes[name] = int(size)
    others_take_rest = -1 in (sizes.get('fsdp'), sizes.get('tensor'))
    return sizes.get('data', 1 if others_take_rest else -1), sizes.get('fsdp', 1), sizes.get('tensor', 1)


def mesh_shape(sizes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """`sizes` of the mesh axes with -1 filled in. Raises UserError unless their product is `num_devices`."""
    text = format_sizes(sizes)
    if any(size != -1 and size < 1 for size in sizes) or list(sizes).count(-1) > 1:
        raise UserError(f'mesh sizes must be positive, at most one of them -1 (the rest), got {text}; {_EXAMPLE}')
    fixed = math.prod(size for size in sizes if size != -1)
    shape = tuple(num_devices // fixed if size == -1 else size for size in sizes)
    if math.prod(shape) != num_devices:
        raise UserError(
            f'mesh {text} does not fit {num_devices} device(s): the sizes must multiply to {num_devices}; {_EXAMPLE}'
        )
    return shape


def build(shape: Sequence[int], devices: Sequence[jax.Device], slices: int | None = None) -> Mesh:
    """The mesh of `devices`, which are in JAX's order; `slices` as in `split_over_slices`.

    Raises:
        UserError: as `split_over_slices`.
    """
    # JAX's default is Explicit, for which sharding constraints are type errors.
    types = (AxisType.Auto,) * len(MESH_AXES)
    attribute, count = slices_of(devices, slices)
    if count == 1:
        return jax.make_mesh(shape, MESH_AXES, types, devices=devices)
    return Mesh(hybrid(shape, devices, attribute, count), MESH_AXES, axis_types=types)


def abstract(shape: Sequence[int], axis_type: AxisType = AxisType.Auto) -> AbstractMesh:
    """A mesh without devices, for tables and shapes."""
    return AbstractMesh(tuple(shape), MESH_AXES, (axis_type,) * len(MESH_AXES))


def slices_of(devices: Sequence[Any], slices: int | None = None) -> tuple[str, int]:
    """The attribute of a device that names its slice, and the number of slices.

    `slices` None uses what the devices report. A number must equal that, or the number of processes for platforms whose
    devices do not report slices (CPU hosts).

    Raises:
        UserError: the number is neither.
    """
    reported = {getattr(device, 'slice_index', None) for device in devices}
    processes = {device.process_index for device in devices}
    if slices is None or slices == len(reported):
        return 'slice_index', len(reported)
    if slices == len(processes):
        return 'process_index', slices
    raise UserError(
        f'slices = {slices}, but the {len(devices)} devices are in {len(reported)} slice(s) and {len(processes)} '
        f'process(es); set Partitioner.slices = {len(reported)}, or None to use what the devices report'
    )


def hybrid(shape: Sequence[int], devices: Sequence[Any], attribute: str, slices: int) -> np.ndarray:
    """Devices [data, fsdp, tensor] such that only `split_over_slices` crosses slices.

    Raises:
        UserError: `data` x `fsdp` cannot be split over the slices, or the slices differ in size.
    """
    counts = collections.Counter(getattr(device, attribute) for device in devices)
    if len(set(counts.values())) > 1:
        raise UserError(f'the {slices} slices must be of equal size, got {sorted(counts.values())} devices')
    outer = split_over_slices(shape, slices)
    inner = tuple(size // across for size, across in zip(shape, outer, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        inner,
        outer,
        devices,
        process_is_granule=attribute == 'process_index',
        allow_split_physical_axes=devices[0].device_kind in _SPLITTING_KINDS,
    )


def split_over_slices(shape: Sequence[int], slices: int) -> tuple[int, int, int]:
    """The number of parts into which the borders between slices cut each axis; their product is `slices`.

    Raises:
        UserError: `data` x `fsdp` does not allow it.
    """
    data, fsdp, _ = shape
    over_data = math.gcd(data, slices)
    over_fsdp = slices // over_data
    if fsdp % over_fsdp:
        raise UserError(
            f'mesh {format_sizes(shape)} does not split over {slices} slices: data x fsdp must be a multiple, '
            f'because tensor stays within a slice; type --mesh=data={slices},fsdp=-1'
        )
    return over_data, over_fsdp, 1


def format_shape(sizes: Mapping[str, int]) -> str:
    """`data=2, fsdp=4, tensor=1` of a mesh's `shape`."""
    return ', '.join(f'{axis}={size}' for axis, size in sizes.items())


def format_sizes(sizes: Sequence[int]) -> str:
    """`data=2,fsdp=4,tensor=1` of (2, 4, 1), as `parse_sizes` reads it."""
    return format_shape(dict(zip(MESH_AXES, sizes, strict=True))).replace(' ', '')
