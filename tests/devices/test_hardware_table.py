"""Topologies of described hardware, and the compiler of each chip."""

import jax
import pytest

from remixer_t5x.devices import chips, hardware_table
from remixer_t5x.devices.hardware_table import Hardware, Topology
from remixer_t5x.errors import UserError


@pytest.mark.parametrize(
    ('text', 'expected', 'platform'),
    [('v5e:4x4', (1, 'v5e', '4x4'), 'tpu'), ('2*H200:8', (2, 'h200', '8'), 'gpu')],
)
def test_topologies_are_parsed(text, expected, platform):
    assert Topology.from_string(text) == expected and Topology.from_string(text).platform == platform
    other = {'tpu': 'gpu', 'gpu': 'tpu'}[platform]
    with pytest.raises(UserError, match=f'hardware/{platform}.gin'):
        Hardware(other, topology=text)


@pytest.mark.parametrize(
    ('topology', 'devices', 'memory', 'mesh'),
    [
        (None, None, None, 'fsdp=-1'),
        ('h100:1', 1, 80, 'data=1'),
        ('2*h100:8', 16, 80, 'data=2,fsdp=-1'),
        # A v3 chip has two devices.
        ('v3:4x4', 32, 16, 'data=-1,fsdp=2'),
        ('2*v5e:4x4', 32, 16, 'data=2,fsdp=-1'),
    ],
)
def test_a_topology_sets_devices_memory_and_mesh(topology, devices, memory, mesh):
    row = hardware_table.devices(topology), hardware_table.memory(topology), hardware_table.mesh(topology)
    assert row == (devices, memory, mesh)
    options = hardware_table.xla_options(topology)
    assert (options is not None and len(options) == 2) == (devices != 1)


@pytest.mark.parametrize(
    ('device_kind', 'chip', 'peak'),
    [
        ('NVIDIA H100 80GB HBM3', 'h100', 989e12),
        ('NVIDIA H100 PCIe', None, 756e12),
        ('TPU v5 lite', 'v5e', 197e12),
        ('TPU v5e', 'v5e', 197e12),
        ('TPU v5', 'v5p', 459e12),
        ('TPU v6e', 'v6e', 918e12),
        ('TPU7x', 'v7x', 1153.5e12),
        ('NVIDIA B200', 'b200', 2250e12),
        ('cpu', None, None),
    ],
)
def test_the_most_specific_device_kind_selects_the_chip(device_kind, chip, peak):
    assert chips.find_chip(device_kind) is chips.CHIPS.get(chip)
    assert chips.get_peak_flops(device_kind) == peak


@pytest.mark.parametrize(('text', 'advice'), [('v5e', '2*v5e:4x4'), ('b300:8', 'v7x, a100, h100'), ('v7:2x2x1', 'v7x')])
def test_unknown_topologies_are_rejected(text, advice):
    with pytest.raises(UserError, match=advice.replace('*', r'\*')):
        Topology.from_string(text)


def test_a_missing_compiler_is_reported_with_its_package(monkeypatch):
    monkeypatch.setattr(hardware_table, 'has_compiler', lambda name: False)
    for platform, topology, package in (('tpu', 'v5e:2x4', 'libtpu'), ('gpu', 'h100:8', 'CUDA plugin')):
        with pytest.raises(UserError, match=f'{package}$'):
            Hardware(platform, topology=topology).require_chip_compiler()
    # Without the compiler, the program is compiled for virtual CPU devices.
    assert Hardware('tpu', topology='v5e:1x1').compiler_name == 'XLA:CPU'


@pytest.mark.parametrize(
    ('platform', 'environment', 'gib'),
    [('gpu', {}, 60), ('gpu', {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.9'}, 72),
     ('gpu', {'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform'}, 80), ('tpu', {}, 80)],
)  # fmt: skip
def test_usable_memory_is_the_fraction_that_jax_preallocates(monkeypatch, platform, environment, gib):
    for name in ('XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_ALLOCATOR'):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    hardware = hardware_table.Hardware(platform, devices=1, memory=80.0)
    assert hardware.memory_bytes == gib * 2**30


@pytest.mark.parametrize('share', ['abc', '-1', 'nan'])
def test_an_invalid_fraction_of_the_memory_is_rejected(monkeypatch, share):
    monkeypatch.setenv('XLA_PYTHON_CLIENT_MEM_FRACTION', share)
    with pytest.raises(UserError, match=f"XLA_PYTHON_CLIENT_MEM_FRACTION must be .*, got '{share}'"):
        hardware_table.Hardware('gpu', devices=1, memory=80.0).memory_bytes  # noqa: B018


def test_invalid_numbers_of_devices_are_rejected():
    with pytest.raises(UserError, match='--devices=32'):
        Hardware().require_num_devices()
    # Virtual devices cannot be added after the initialization.
    with pytest.raises(UserError, match='a new process'):
        Hardware('gpu', devices=len(jax.devices()) + 1).get_target_devices()
