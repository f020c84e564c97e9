"""Builds the device mesh `data` x `fsdp` x `tensor`: parses its sizes and arranges the devices.

A slice is a group of devices with fast links: a TPU slice (ICI), or the GPUs of a node (NVLink). If there are multiple
slices, the axes with the least communication span them: first `data`, then `fsdp`, but never `tensor`. JAX arranges the
devices of one slice (`jax.make_mesh`) or of multiple slices (`create_hybrid_device_mesh`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from remixer_t5x import ranges
from remixer_t5x.errors import UserError, suggest_similar_name

MESH_AXES = ('data', 'fsdp', 'tensor')
# Device kinds for which a mesh axis may span fractions of several physical axes, as in `jax.make_mesh`.
_SPLIT_AXES_KINDS = ('TPU v5 lite', 'TPU v5e')


def parse_mesh_sizes(text: str) -> tuple[int, int, int]:
    """Parses `'data=2,fsdp=4'` into (data, fsdp, tensor); -1 means all remaining devices.

    An omitted axis has size 1, except that `data` defaults to -1 if no other axis is -1. Raises UserError if `text` is
    not a comma-separated list of distinct axes with whole numbers.
    """
    sizes: dict[str, int] = {}
    for part in str(text).rstrip(', ').split(','):
        name, _, value = (word.strip() for word in part.partition('='))
        size = ranges.parse_whole_number(value, -1)
        if name not in MESH_AXES or name in sizes or size is None:
            raise UserError(
                f'MESH must assign a size to each axis at most once (axes: {", ".join(MESH_AXES)}), got {text!r}'
                f'{suggest_similar_name(name, MESH_AXES)}; use, for example, data=2,fsdp=4'
            )
        sizes[name] = size
    default_data = 1 if -1 in (sizes.get('fsdp'), sizes.get('tensor')) else -1
    return sizes.get('data', default_data), sizes.get('fsdp', 1), sizes.get('tensor', 1)


def resolve_mesh_shape(sizes: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Replaces -1 in `sizes` by the number of remaining devices. Raises UserError if the sizes do not match."""
    fixed = abs(math.prod(sizes)) or 1
    shape = tuple(num_devices // fixed if size == -1 else size for size in sizes)
    if min(shape) < 1 or math.prod(shape) != num_devices or list(sizes).count(-1) > 1:
        raise UserError(
            f'MESH must have sizes whose product is the number of devices, {num_devices}, got '
            f'{format_mesh_sizes(sizes)}; use -1 for one size, as in data=-1,fsdp=1,tensor=1'
        )
    return shape


def build_mesh(shape: Sequence[int], devices: Sequence[jax.Device]) -> Mesh:
    """Builds a mesh from devices in JAX's order. Devices that report no slice belong to one slice."""
    # Override JAX's default axis type, Explicit, which does not allow sharding constraints.
    types = (AxisType.Auto,) * len(MESH_AXES)
    slices = len({getattr(device, 'slice_index', None) for device in devices})
    if slices == 1:
        return jax.make_mesh(shape, MESH_AXES, types, devices=devices)
    return Mesh(arrange_devices_over_slices(shape, devices, slices), MESH_AXES, axis_types=types)


def build_abstract_mesh(shape: Sequence[int], axis_type: AxisType = AxisType.Auto) -> AbstractMesh:
    """Returns a mesh without devices, for computing shapes and shardings."""
    return AbstractMesh(tuple(shape), MESH_AXES, (axis_type,) * len(MESH_AXES))


def arrange_devices_over_slices(shape: Sequence[int], devices: Sequence[Any], slices: int) -> np.ndarray:
    """Arranges devices as [data, fsdp, tensor]; only axes selected by `split_axes_over_slices` span slices."""
    outer = split_axes_over_slices(shape, slices)
    inner = tuple(size // across for size, across in zip(shape, outer, strict=True))
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=devices[0].device_kind in _SPLIT_AXES_KINDS
    )


def split_axes_over_slices(shape: Sequence[int], slices: int) -> tuple[int, int, int]:
    """Returns the number of slices that each mesh axis spans. The product of these numbers is `slices`.

    Raises UserError if `data` x `fsdp` is not a multiple of `slices`.
    """
    data, fsdp, _ = shape
    over_data = math.gcd(data, slices)
    over_fsdp = slices // over_data
    if fsdp % over_fsdp:
        raise UserError(
            f'the product of data and fsdp in MESH must be a multiple of {slices}, the number of slices, got '
            f'{format_mesh_sizes(shape)}; use data={slices},fsdp=-1'
        )
    return over_data, over_fsdp, 1


def format_mesh_shape(sizes: Mapping[str, int]) -> str:
    """Formats a mesh's `shape` as `data=2, fsdp=4, tensor=1`."""
    return ', '.join(f'{axis}={size}' for axis, size in sizes.items())


def format_mesh_sizes(sizes: Sequence[int]) -> str:
    """Formats (2, 4, 1) as `data=2,fsdp=4,tensor=1`, the format of `parse_mesh_sizes`."""
    return format_mesh_shape(dict(zip(MESH_AXES, sizes, strict=True))).replace(' ', '')
