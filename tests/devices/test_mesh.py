"""Mesh sizes, and the arrangement of devices over slices."""

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
    """The attributes that JAX's mesh builder reads."""

    id: int
    slice_index: int | None = None
    process_index: int = 0
    platform: str = 'gpu'
    device_kind: str = 'NVIDIA H100'


def devices(count, slices):
    return [FakeDevice(i, i * slices // count) for i in range(count)]


@settings(deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 8)] * 3), rest=st.sampled_from([None, 0, 1, 2]))
def test_mesh_shape_fills_in_the_rest(sizes, rest):
    count = math.prod(sizes)
    partial = tuple(-1 if i == rest else size for i, size in enumerate(sizes))
    assert mesh.resolve_mesh_shape(partial, count) == sizes


@pytest.mark.parametrize('sizes', [(3, 1, 1), (-1, 3, 1), (-1, -1, 1), (0, 8, 1)])
def test_a_mesh_that_does_not_fit_the_devices_is_rejected(sizes):
    with pytest.raises(UserError, match='MESH must .* devices, 8, got .*as in data=-1'):
        mesh.resolve_mesh_shape(sizes, 8)


def test_sizes_are_parsed():
    assert mesh.parse_mesh_sizes(' tensor = 2 , data=3,') == (3, 1, 2)
    assert mesh.parse_mesh_sizes('fsdp=4') == (-1, 4, 1)
    assert mesh.parse_mesh_sizes('fsdp=-1') == (1, -1, 1)


@pytest.mark.parametrize(
    ('text', 'hint'),
    [('dta=2', 'did you mean data.'), ('fsdp=two', ''), ('fsdp=2,fsdp=4', '')],
)
def test_invalid_sizes_are_rejected(text, hint):
    with pytest.raises(UserError, match=f'got {text!r}.*{hint}; use, for example, data=2,fsdp=4'):
        mesh.parse_mesh_sizes(text)


@settings(deadline=None)
@given(inner=st.tuples(*[st.sampled_from([1, 2, 3])] * 3), slices=st.sampled_from([2, 3, 4]), over_fsdp=st.booleans())
def test_only_data_and_then_fsdp_cross_slices(inner, slices, over_fsdp):
    shape = (inner[0], inner[1] * slices, inner[2]) if over_fsdp else (inner[0] * slices, *inner[1:])
    reported = devices(math.prod(shape), slices)
    arranged = mesh.arrange_devices_over_slices(shape, reported, slices)
    assert arranged.shape == shape and {device.id for device in arranged.flat} == set(range(len(reported)))
    index = np.vectorize(lambda device: device.slice_index)(arranged)
    assert (index == index[:, :, :1]).all()
    if shape[0] % slices == 0:
        # Each index of `data` is within one slice, so that gathers over `fsdp` use only fast links.
        assert (index == index[:, :1, :1]).all()


def test_a_mesh_that_does_not_fit_the_slices_is_rejected():
    with pytest.raises(UserError, match='use data=2,fsdp=-1'):
        mesh.split_axes_over_slices((1, 1, 8), 2)
