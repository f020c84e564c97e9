"""Sizes of the mesh as text, and which device stands where when some links are slow."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remixer_t5x.devices import mesh
from remixer_t5x.errors import UserError


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What JAX's mesh builder reads of a device."""

    id: int
    slice_index: int | None = None
    process_index: int = 0
    platform: str = 'gpu'
    device_kind: str = 'NVIDIA H100'


def devices(count, slices=1, processes=1):
    return [FakeDevice(i, i * slices // count, i * processes // count) for i in range(count)]


@settings(deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 8)] * 3), rest=st.sampled_from([None, 0, 1, 2]))
def test_mesh_shape_fills_in_the_rest(sizes, rest):
    count = math.prod(sizes)
    asked = tuple(-1 if i == rest else size for i, size in enumerate(sizes))
    assert mesh.mesh_shape(asked, count) == sizes


@pytest.mark.parametrize('sizes', [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 8, 1), (1, 1, 1), (16, 1, 1), (-1, 16, 1)])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes):
    with pytest.raises(UserError, match='--mesh=data=-1') as error:
        mesh.mesh_shape(sizes, 8)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    ('text', 'sizes'),
    [
        ('data=2,fsdp=4', (2, 4, 1)),
        (' tensor = 2 , data=3,', (3, 1, 2)),
        ('fsdp=4', (-1, 4, 1)),
        ('fsdp=-1', (1, -1, 1)),
        ('data=-1,fsdp=2,tensor=2', (-1, 2, 2)),
    ],
)
def test_sizes_are_read_from_text(text, sizes):
    assert mesh.parse_sizes(text) == sizes


@pytest.mark.parametrize(
    ('text', 'advice'),
    [
        ('dta=2', 'type --mesh=data=2'),
        ('tensors=2', 'type --mesh=tensor=2'),
        ('fsdp', '--mesh=fsdp=2'),
        ('fsdp=two', '--mesh=fsdp=2'),
        ('fsdp=2,fsdp=4', 'must have one size'),
        ('', '--mesh=data=2,fsdp=4'),
        (8, '--mesh=data=2,fsdp=4'),
    ],
)
def test_wrong_sizes_are_one_line_with_what_to_type(text, advice):
    with pytest.raises(UserError, match=advice) as error:
        mesh.parse_sizes(text)
    assert '\n' not in str(error.value)


@settings(deadline=None)
@given(inner=st.tuples(*[st.sampled_from([1, 2, 3])] * 3), slices=st.sampled_from([2, 3, 4]), over_fsdp=st.booleans())
def test_only_data_and_then_fsdp_cross_slices(inner, slices, over_fsdp):
    shape = (inner[0], inner[1] * slices, inner[2]) if over_fsdp else (inner[0] * slices, *inner[1:])
    reported = devices(math.prod(shape), slices)
    found = mesh.hybrid(shape, reported, *mesh.slices_of(reported))
    assert found.shape == shape and {device.id for device in found.flat} == set(range(len(reported)))
    index = np.vectorize(lambda device: device.slice_index)(found)
    assert (index == index[:, :, :1]).all()
    if shape[0] % slices == 0:
        # Each part of `data` is in one slice, so that gathering over `fsdp` uses fast links alone.
        assert (index == index[:, :1, :1]).all()


def test_processes_stand_for_slices_where_devices_do_not_tell():
    reported = [dataclasses.replace(device, slice_index=None) for device in devices(8, processes=2)]
    assert mesh.slices_of(reported) == ('slice_index', 1)
    found = mesh.hybrid((2, 4, 1), reported, *mesh.slices_of(reported, 2))
    assert [[device.process_index for device in row] for row in found[:, :, 0]] == [[0] * 4, [1] * 4]


@pytest.mark.parametrize('shape', [(1, 1, 8), (1, 3, 2), (3, 3, 2)])
def test_tensor_does_not_cross_slices(shape):
    with pytest.raises(UserError, match='--mesh=data=2,fsdp=-1') as error:
        mesh.split_over_slices(shape, 2)
    assert '\n' not in str(error.value)


def test_slices_that_are_not_there_are_refused():
    with pytest.raises(UserError, match='Partitioner.slices = 2'):
        mesh.slices_of(devices(8, slices=2), 4)
    uneven = [*devices(4, slices=2), FakeDevice(4, 1)]
    with pytest.raises(UserError, match='equal size'):
        mesh.hybrid((5, 1, 1), uneven, 'slice_index', 2)
